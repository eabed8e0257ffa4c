"""Reads GGUF files: metadata and where each tensor lies. Every count, length and offset is checked against the file first.

The file is mapped, tensors stay where they are: opening costs the metadata, whatever the size of the weights.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from calstack.errors import UnsupportedError
from calstack.frontends.metadata import Metadata
from calstack.frontends.reading import bad, map_file
from calstack.graph.blocks import KINDS

__all__ = ["GGUFFile", "TensorEntry", "read_gguf"]

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_NAME = 1024
_MAX_DIMS = 4
_LEAST_PAIR = 13  # bytes: empty key, type, one byte of value
_LEAST_TENSOR = 32  # bytes: empty name, one dimension, type, offset

# ggml's tensor types, for messages; those in KINDS can be read.
_TYPE_NAMES = (
    "F32 F16 Q4_0 Q4_1 Q4_2 Q4_3 Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS IQ3_XXS IQ1_S "
    "IQ4_NL IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16"
)
_TYPES = dict(enumerate(_TYPE_NAMES.split())) | {34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"}


@dataclasses.dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies: `shape` is outermost first (rows, columns), `offset` counts from the start of the file."""

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class GGUFFile:
    """An open GGUF file."""

    path: Path
    map: mmap.mmap
    metadata: Metadata
    tensors: Mapping[str, TensorEntry]


class _Cursor:
    """Reads forward; every read is checked against the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at, self.end = path, data, 0, len(data)

    def need(self, nbytes: int, field: str) -> int:
        """Advance over `nbytes`, giving where they start."""
        start = self.at
        if nbytes > self.end - start:
            bad(self.path, field, f"needs {nbytes} bytes at offset {start}, the file ends at {self.end}")
        self.at = start + nbytes
        return start

    def scalar(self, code: str, field: str) -> Any:
        layout = "<" + code
        return struct.unpack_from(layout, self.data, self.need(struct.calcsize(layout), field))[0]

    def count(self, field: str, least: int) -> int:
        """A 64-bit count of things that take at least `least` bytes each."""
        n: int = self.scalar("Q", field)
        if n > (self.end - self.at) // least:
            bad(self.path, field, f"the count {n} is more than the file can hold")
        return n

    def string(self, field: str, limit: int | None = None) -> str:
        n = self.count(field, 1)
        if limit is not None and n > limit:
            bad(self.path, field, f"a name of {n} bytes is longer than {limit}")
        start = self.need(n, field)
        try:
            return self.data[start : start + n].decode("utf-8")
        except UnicodeDecodeError:
            bad(self.path, field, f"the text at offset {start} is not UTF-8")

    def strings(self, n: int, field: str) -> list[str]:
        # The hot loop of opening a file (100,000 tokens and merges): one check per string, no calls.
        data, at, end = self.data, self.at, self.end
        unpack = struct.Struct("<Q").unpack_from
        out: list[str] = []
        try:
            for _ in range(n):
                if end - at < 8:
                    bad(self.path, field, f"the file ends inside element {len(out)}")
                stop = at + 8 + unpack(data, at)[0]
                if stop > end:
                    bad(self.path, field, f"element {len(out)} reaches past the end of the file")
                out.append(data[at + 8 : stop].decode("utf-8"))
                at = stop
        except UnicodeDecodeError:
            bad(self.path, field, f"element {len(out)} is not UTF-8")
        self.at = at
        return out


def _value(cursor: _Cursor, kind: int, field: str) -> Any:
    if kind in _SCALARS:
        return cursor.scalar(_SCALARS[kind], field)
    if kind == _STRING:
        return cursor.string(field)
    if kind != _ARRAY:
        bad(cursor.path, field, f"unknown value type {kind}")
    return _array(cursor, field)


def _array(cursor: _Cursor, field: str) -> Any:
    kind = cursor.scalar("I", field)
    if kind == _STRING:
        return cursor.strings(cursor.count(field, 8), field)
    if kind not in _SCALARS:
        bad(cursor.path, field, f"an array of value type {kind} is not supported", "remove this key")
    dtype = np.dtype("<" + _SCALARS[kind]) if kind != 7 else np.dtype(np.bool_)
    n = cursor.count(field, dtype.itemsize)
    start = cursor.need(n * dtype.itemsize, field)
    return np.frombuffer(cursor.data, dtype, n, start).copy()


def _read_metadata(cursor: _Cursor, n: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for index in range(n):
        key = cursor.string(f"metadata key {index}", _MAX_NAME)
        if key in values:
            bad(cursor.path, key, "the key appears twice")
        values[key] = _value(cursor, cursor.scalar("I", key), key)
    return values


@dataclasses.dataclass(frozen=True, slots=True)
class _Header:
    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int  # from the start of the data
    bytes: int


def _read_header(cursor: _Cursor, index: int) -> _Header:
    name = cursor.string(f"tensor {index}", _MAX_NAME)
    field = f"tensor {name!r}"
    dims = cursor.scalar("I", field)
    if not 1 <= dims <= _MAX_DIMS:
        bad(cursor.path, field, f"{dims} dimensions, expected 1 to {_MAX_DIMS}")
    shape = tuple(cursor.scalar("Q", field) for _ in range(dims))[::-1]
    kind = _kind(cursor, cursor.scalar("I", field), field)
    return _Header(name, kind, shape, cursor.scalar("Q", field), _tensor_bytes(cursor, kind, shape, field))


def _kind(cursor: _Cursor, code: int, field: str) -> str:
    if code not in _TYPES:
        bad(cursor.path, field, f"unknown tensor type {code}")
    if _TYPES[code] not in KINDS:
        raise UnsupportedError(
            f"the tensor type {_TYPES[code]} is not supported",
            where=f"{cursor.path}: {field}",
            remedy=f"use a file with {', '.join(KINDS)} only",
        )
    return _TYPES[code]


def _tensor_bytes(cursor: _Cursor, kind: str, shape: tuple[int, ...], field: str) -> int:
    if 0 in shape:
        bad(cursor.path, field, "a dimension is 0")
    if shape[-1] % KINDS[kind].block:
        bad(cursor.path, field, f"rows of {shape[-1]} values are not whole {kind} blocks")
    return math.prod(shape[:-1]) * KINDS[kind].row_bytes(shape[-1])  # Python integers: no overflow


def _alignment(path: Path, values: dict[str, Any]) -> int:
    alignment = values.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment % 8 or not 8 <= alignment <= 1 << 20:
        bad(path, "general.alignment", f"{str(alignment)[:40]} is not a multiple of 8 up to {1 << 20}")
    return alignment


def _place(cursor: _Cursor, headers: list[_Header], alignment: int) -> dict[str, TensorEntry]:
    """Absolute offsets; tensors must be aligned, inside the file, apart from each other, and reach its end."""
    start = end = -(-cursor.at // alignment) * alignment
    placed: dict[str, TensorEntry] = {}
    for header in sorted(headers, key=lambda h: h.offset):
        field = f"tensor {header.name!r}"
        offset = start + header.offset
        if header.name in placed:
            bad(cursor.path, field, "the name appears twice")
        if header.offset % alignment:
            bad(cursor.path, field, f"the offset {header.offset} is not a multiple of {alignment}")
        if offset + header.bytes > cursor.end:
            bad(cursor.path, field, f"{header.bytes} bytes at offset {offset} reach past the end of the file ({cursor.end} bytes)")
        if offset < end:
            bad(cursor.path, field, "its bytes overlap those of another tensor")
        end = offset + header.bytes
        placed[header.name] = TensorEntry(header.name, header.kind, header.shape, offset, header.bytes)
    if cursor.end > max(-(-end // alignment) * alignment, cursor.at):
        bad(cursor.path, "", f"the file is oversized: {cursor.end - end} bytes follow the last tensor")
    return placed


def read_gguf(path: Path) -> GGUFFile:
    """Open a GGUF file.

    Raises SourceError when it is damaged, UnsupportedError for a version or tensor type that cannot be read.
    """
    cursor = _Cursor(path, map_file(path))
    if cursor.data[:4] != MAGIC:
        bad(path, "magic", f"not a GGUF file: it starts with {cursor.data[:4]!r}", "give a GGUF file or a model directory")
    cursor.at = min(4, cursor.end)
    version = cursor.scalar("I", "version")
    if version not in _VERSIONS:
        raise UnsupportedError(f"GGUF version {version} is not supported", where=str(path), remedy="convert it to version 3, little endian")
    n_tensors = cursor.count("tensor count", _LEAST_TENSOR)
    n_pairs = cursor.count("metadata count", _LEAST_PAIR)
    values = _read_metadata(cursor, n_pairs)
    headers = [_read_header(cursor, index) for index in range(n_tensors)]
    return GGUFFile(path, cursor.data, Metadata(path, values), _place(cursor, headers, _alignment(path, values)))
