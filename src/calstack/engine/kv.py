"""Paged KV blocks: who holds which block, shared prefixes, and what is free.

A block is in exactly one of three places: free, held by one or more requests (its reference count), or idle in the prefix
index (named, held by nobody, evicted when blocks run out). Launches run in order on the device, so a block may be given to
another request while a launch that writes to it is still in flight: the new owner's writes come later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from calstack.engine.prefix import PrefixIndex, chain

__all__ = ["BlockPool"]


class BlockPool:
    """All KV blocks of a calbin on a device."""

    def __init__(self, blocks: int, positions: int, *, cache_limit: int = 0) -> None:
        """`blocks` blocks of `positions` positions; at most `cache_limit` idle blocks stay in the prefix cache."""
        self.total, self.positions, self.cache_limit = blocks, positions, cache_limit
        self._free: deque[int] = deque(range(blocks))
        self._refs = [0] * blocks
        self._index = PrefixIndex()
        self._written: set[int] = set()  # free blocks whose memory may still be committed

    @property
    def available(self) -> int:
        """Blocks that `take` can give now."""
        return len(self._free) + self._index.idle

    @property
    def held(self) -> int:
        """Blocks held by requests."""
        return self.total - self.available

    def take(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, or None (and nothing taken) when there are not so many."""
        if count > self.available:
            return None
        taken = [self._pop() for _ in range(count)]
        for block in taken:
            self._refs[block] = 1
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Give one reference of each block back. The last blocks of a chain become evictable before its first."""
        for block in reversed(blocks):
            if self._refs[block] < 1:
                raise AssertionError(f"block {block} was released more often than taken")
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._rest(block)

    def match(self, root: bytes, ids: Sequence[int], limit: int) -> tuple[list[int], bytes]:
        """Take a reference of each cached block that covers a prefix of `ids`, at most `limit` blocks; and the last one's key."""
        found: list[int] = []
        last = root
        for key in self._keys(root, ids, limit):
            block = self._index.find(key)
            if block is None:
                break
            self._index.wake(block)
            self._refs[block] += 1
            found.append(block)
            last = key
        return found, last

    def publish(self, parent: bytes, ids: Sequence[int], block: int) -> bytes:
        """Name a held, fully computed block that follows `parent`; returns its key."""
        key = chain(parent, ids)
        if self.cache_limit > 0:
            self._index.add(key, block)
        return key

    def forget(self) -> None:
        """Drop the whole prefix cache: contents are lost."""
        self._free.extend(self._index.clear())

    def uncommitted(self) -> list[int]:
        """Free blocks written since the last call: their memory can be given back."""
        blocks = sorted(self._written)
        self._written.clear()
        return blocks

    def leaks(self) -> int:
        """Blocks held although nothing runs, or counted wrongly. 0 is the only good answer when the engine is idle."""
        held = sum(1 for refs in self._refs if refs != 0)
        free = set(self._free)
        misplaced = sum(1 for block in range(self.total) if (block in free) + self._index.holds(block) != 1)
        return max(held, misplaced, len(self._free) - len(free))

    def _keys(self, root: bytes, ids: Sequence[int], limit: int) -> Iterator[bytes]:
        key, size = root, self.positions
        for i in range(min(limit, len(ids) // size)):
            key = chain(key, ids[i * size : (i + 1) * size])
            yield key

    def _pop(self) -> int:
        block = self._free.popleft() if self._free else self._index.evict()
        if block is None:
            raise AssertionError("the pool promised a block that it does not have")
        self._written.discard(block)
        return block

    def _rest(self, block: int) -> None:
        if not self._index.holds(block):
            self._drop(block)
            return
        self._index.rest(block)
        while self._index.idle > self.cache_limit:
            evicted = self._index.evict()
            if evicted is not None:
                self._drop(evicted)

    def _drop(self, block: int) -> None:
        self._written.add(block)
        self._free.appendleft(block)  # the last one used: its memory is committed and warm
