"""Reads safetensors files: the header only, checked against the file; tensors stay mapped.

Our own reader because the library's numpy mode has no bf16; a header is a dozen lines of JSON.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any

from calstack.errors import UnsupportedError
from calstack.frontends.mapped import MappedTensor
from calstack.frontends.reading import bad, map_file, parse_json
from calstack.graph.blocks import KINDS

__all__ = ["MAX_HEADER_BYTES", "read_safetensors"]

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_KINDS = ("F32", "F16", "BF16")
_OTHERS = {"BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F64", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "F6_E2M3", "F6_E3M2"}
_MAX_DIMS = 8


def read_safetensors(path: Path, *, skip: tuple[str, ...] = ()) -> dict[str, MappedTensor]:
    """Tensors by name; those whose name ends as `skip` says are left out, whatever their element type.

    Raises SourceError when the file is damaged, UnsupportedError for an element type other than f32, f16, bf16.
    """
    data = map_file(path)
    start, header = _header(path, data)
    header.pop("__metadata__", None)
    tensors = {name: _tensor(path, data, start, name, entry) for name, entry in header.items() if not name.endswith(skip)}
    spans = {name: (tensor.offset, tensor.nbytes) for name, tensor in tensors.items()}
    spans |= {name: _span(path, start, name, entry) for name, entry in header.items() if name not in tensors}
    _check_layout(path, spans, start, len(data))
    return tensors


def _span(path: Path, start: int, name: str, entry: Any) -> tuple[int, int]:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if offsets is None or not _naturals(offsets) or len(offsets) != 2 or offsets[1] < offsets[0]:
        bad(path, f"tensor {name[:120]!r}", f"the data_offsets {str(offsets)[:60]} are not [begin, end]")
    return start + offsets[0], offsets[1] - offsets[0]


def _header(path: Path, data: mmap.mmap) -> tuple[int, dict[str, Any]]:
    if len(data) < 8:
        bad(path, "header", "the file is shorter than a safetensors header")
    (size,) = struct.unpack_from("<Q", data, 0)
    if size > min(len(data) - 8, MAX_HEADER_BYTES):
        bad(path, "header", f"a header of {size} bytes does not fit the file of {len(data)}")
    return 8 + size, parse_json(path, "header", data[8 : 8 + size])


def _tensor(path: Path, data: mmap.mmap, start: int, name: str, entry: Any) -> MappedTensor:
    field = f"tensor {name[:120]!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        bad(path, field, "the entry is not {dtype, shape, data_offsets}")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if kind not in _KINDS:
        _refuse_kind(path, field, kind)
    if not _naturals(shape) or not 1 <= len(shape) <= _MAX_DIMS or 0 in shape:
        bad(path, field, f"the shape {str(shape)[:60]} is not a list of 1 to {_MAX_DIMS} positive numbers")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[1] < offsets[0]:
        bad(path, field, f"the data_offsets {str(offsets)[:60]} are not [begin, end]")
    nbytes = math.prod(shape) * KINDS[kind].bytes
    if offsets[1] - offsets[0] != nbytes:
        bad(path, field, f"{offsets[1] - offsets[0]} bytes are stored, the shape needs {nbytes}")
    if start + offsets[1] > len(data):
        bad(path, field, f"its data end at {start + offsets[1]}, the file at {len(data)}")
    return MappedTensor(name, kind, tuple(shape), data, start + offsets[0])


def _refuse_kind(path: Path, field: str, kind: Any) -> None:
    if not isinstance(kind, str) or kind not in _OTHERS:
        bad(path, field, f"unknown dtype {str(kind)[:32]!r}")
    raise UnsupportedError(f"the dtype {kind} is not supported", where=f"{path}: {field}", remedy="supported: F32, F16, BF16")


def _naturals(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 1 << 62 for v in values)


def _check_layout(path: Path, spans: dict[str, tuple[int, int]], start: int, end: int) -> None:
    """Tensors lie one after another without gaps or overlaps, up to the end of the file, as the format demands."""
    at = start
    for name, (offset, nbytes) in sorted(spans.items(), key=lambda item: item[1]):
        if offset != at:
            bad(path, f"tensor {name[:120]!r}", "its bytes overlap another tensor's or leave a gap")
        at += nbytes
    if at != end:
        bad(path, "", f"the file is oversized: {end - at} bytes follow the last tensor")
