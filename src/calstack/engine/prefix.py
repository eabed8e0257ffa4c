"""The prefix cache: full KV blocks by the hash chain of their token ids, adapter and salt."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

__all__ = ["PrefixIndex", "chain", "root_key"]


def root_key(adapter: int, salt: str) -> bytes:
    """Where a chain starts: requests with another adapter or salt never meet."""
    return hashlib.blake2b(f"{adapter}\0{salt}".encode(), digest_size=16).digest()


def chain(parent: bytes, ids: Sequence[int]) -> bytes:
    """The key of a full block that follows `parent`."""
    return hashlib.blake2b(parent + array("i", ids).tobytes(), digest_size=16).digest()


class PrefixIndex:
    """Maps chain keys to blocks. A block has at most one key; a key names one block.

    Blocks that no request holds are kept in order of last use; who holds a block is the pool's business.
    """

    def __init__(self) -> None:
        self._block: dict[bytes, int] = {}
        self._key: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # oldest use first

    def find(self, key: bytes) -> int | None:
        """The block that a key names."""
        return self._block.get(key)

    def add(self, key: bytes, block: int) -> None:
        """Name a block; does nothing when the key or the block is named already."""
        if key not in self._block and block not in self._key:
            self._block[key] = block
            self._key[block] = key

    def holds(self, block: int) -> bool:
        """True when the block is named, so that its contents must stay."""
        return block in self._key

    def rest(self, block: int) -> None:
        """No request holds the block any more: it is now the most recently used idle one."""
        self._idle[block] = None

    def wake(self, block: int) -> None:
        """A request holds the block again."""
        self._idle.pop(block, None)

    def evict(self) -> int | None:
        """Forget the idle block that was used longest ago and return it."""
        if not self._idle:
            return None
        block, _ = self._idle.popitem(last=False)
        del self._block[self._key.pop(block)]
        return block

    @property
    def idle(self) -> int:
        """Named blocks that no request holds."""
        return len(self._idle)

    def clear(self) -> list[int]:
        """Forget all names (contents are lost); returns the idle blocks."""
        idle = list(self._idle)
        self._block.clear()
        self._key.clear()
        self._idle.clear()
        return idle
