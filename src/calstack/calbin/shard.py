"""A parameter shard: a safetensors file of U8 tensors, each padded to whole pages inside its own byte range.

The header is padded with spaces so that the data starts on a page, and tensors follow each other without holes: any safetensors
reader takes the file, and a device maps every tensor page-aligned. True sizes stand in the manifest.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec
import numpy as np

from calstack.errors import ArtifactError

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["HEADER_LIMIT", "PAGE", "Shard", "ShardWriter", "padded"]

PAGE = 4096
HEADER_LIMIT = 64 << 20  # bytes; about 500,000 tensors


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def padded(nbytes: int) -> int:
    """`nbytes` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


class ShardWriter:
    """Writes tensors in the order given at construction; the header comes first, so sizes must be known up front.

    Args:
        file: a new binary file.
        sizes: (name, true bytes) of every tensor, in file order.
    """

    def __init__(self, file: BinaryIO, sizes: Iterable[tuple[str, int]]) -> None:
        self._file, self._sizes = file, list(sizes)
        self._next = 0
        self._hash = hashlib.sha256()
        self._bytes = 0
        self._write(_header(self._sizes))

    def add(self, name: str, data: npt.NDArray[np.uint8]) -> None:
        """Append the next tensor and its padding; order and size must be the announced ones."""
        want, nbytes = self._sizes[self._next]
        assert (name, data.nbytes) == (want, nbytes), f"{name}: {data.nbytes} bytes, announced {want}: {nbytes}"
        self._next += 1
        self._write(np.ascontiguousarray(data).reshape(-1).data)
        self._write(b"\0" * (padded(nbytes) - nbytes))

    def finish(self) -> tuple[int, str]:
        """File size in bytes and its sha256; every announced tensor must have been added."""
        assert self._next == len(self._sizes), "a tensor is missing"
        return self._bytes, self._hash.hexdigest()

    def _write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._hash.update(data)
        self._bytes += len(data)


def _header(sizes: Iterable[tuple[str, int]]) -> bytes:
    entries, offset = {}, 0
    for name, nbytes in sizes:
        entries[name] = _Entry("U8", (padded(nbytes),), (offset, offset + padded(nbytes)))
        offset += padded(nbytes)
    text = msgspec.json.encode(entries)
    text += b" " * (padded(8 + len(text)) - 8 - len(text))
    return len(text).to_bytes(8, "little") + text


class Shard:
    """A mapped shard. Tensors are read-only views that live as long as the shard is open.

    Raises:
        ArtifactError: when the header is larger than the file or breaks the layout rules.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.bytes = os.fstat(file.fileno()).st_size
                self._data_start, self._ranges = _read_header(file, self.bytes, path.name)
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ArtifactError(f"cannot be read: {error.strerror}", where=str(path), remedy="compile the model again") from error
        self._bytes_view = np.frombuffer(self._map, dtype=np.uint8)

    @property
    def data_start(self) -> int:
        """File offset of the first tensor, a multiple of the page size."""
        return self._data_start

    def names(self) -> tuple[str, ...]:
        """Tensor names in file order."""
        return tuple(self._ranges)

    def range(self, name: str) -> tuple[int, int]:
        """File offset and padded size of a tensor, bytes."""
        start, end = self._ranges[name]
        return self._data_start + start, end - start

    def tensor(self, name: str, nbytes: int) -> npt.NDArray[np.uint8]:
        """The first `nbytes` (its true size) of a tensor, without a copy."""
        start, room = self.range(name)
        assert nbytes <= room, "sizes are checked when the calbin is opened"
        return self._bytes_view[start : start + nbytes]


def _bad(what: str, name: str, field: str = "header") -> ArtifactError:
    return ArtifactError(f"{field} {what}", where=name, remedy="the file is damaged; compile the model again or fetch it anew")


def _read_header(file: BinaryIO, size: int, name: str) -> tuple[int, dict[str, tuple[int, int]]]:
    """Data start and {tensor: (start, end) relative to it}; everything is bounded by the file's size before it is read."""
    if size < 8:
        raise _bad(f"needs 8 bytes, the file has {size}", name)
    length = int.from_bytes(file.read(8), "little")
    if length > min(HEADER_LIMIT, size - 8):
        raise _bad(f"claims {length} bytes, the file has {size} (limit {HEADER_LIMIT})", name)
    try:
        entries = msgspec.json.decode(file.read(length), type=dict[str, _Entry])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _bad(f"is not valid: {error}", name) from error
    data_start = 8 + length
    if data_start % PAGE:
        raise _bad(f"ends at byte {data_start}, not on a page of {PAGE}", name)
    return data_start, _ranges(entries, size - data_start, name)


def _ranges(entries: Mapping[str, _Entry], room: int, name: str) -> dict[str, tuple[int, int]]:
    ranges, at = {}, 0
    for tensor, entry in entries.items():
        start, end = entry.data_offsets
        if entry.dtype != "U8" or entry.shape != (end - start,):
            raise _bad("must be U8 with the shape of its byte range", name, f"$.{tensor}.shape")
        if start != at or end <= start or end > room or end % PAGE:
            raise _bad(
                f"is {start}..{end}: tensors must follow each other in whole pages within {room} bytes", name, f"$.{tensor}.data_offsets"
            )
        ranges[tensor], at = (start, end), end
    if at != room:
        raise _bad(f"covers {at} bytes of data, the file has {room}", name)
    return ranges
