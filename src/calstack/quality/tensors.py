"""A few small arrays as safetensors, without the library: the serve side verifies goldens with it too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from calstack.errors import ArtifactError

if TYPE_CHECKING:
    import numpy.typing as npt

    Arrays = Mapping[str, npt.NDArray[Any]]

__all__ = ["load_tensors", "save_tensors"]

_DTYPES: dict[str, np.dtype[Any]] = {"I32": np.dtype("<i4"), "F32": np.dtype("<f4"), "F64": np.dtype("<f8")}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def save_tensors(arrays: Arrays) -> bytes:
    """The file's bytes; arrays in the order given."""
    entries, at = {}, 0
    for name, array in arrays.items():
        entries[name] = _Entry(_NAMES[array.dtype], array.shape, (at, at + array.nbytes))
        at += array.nbytes
    header = msgspec.json.encode(entries)
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + b"".join(np.ascontiguousarray(a).tobytes() for a in arrays.values())


def load_tensors(data: bytes, name: str) -> dict[str, npt.NDArray[Any]]:
    """Read-only views of the arrays.

    Raises:
        ArtifactError: when the header does not fit the data.
    """
    length = int.from_bytes(data[:8], "little")
    if length > len(data) - 8:
        raise _bad(name, f"header claims {length} bytes, the file has {len(data)}")
    try:
        entries = msgspec.json.decode(data[8 : 8 + length], type=dict[str, _Entry])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _bad(name, f"header is not valid: {error}") from error
    return {key: _view(data[8 + length :], entry, key, name) for key, entry in entries.items()}


def _view(body: bytes, entry: _Entry, key: str, name: str) -> npt.NDArray[Any]:
    start, end = entry.data_offsets
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None or not 0 <= start <= end <= len(body) or any(n < 0 for n in entry.shape) or len(entry.shape) > 2:
        raise _bad(name, f"$.{key}: {entry.dtype} at {start}..{end} of {len(body)} bytes")
    count = 1
    for n in entry.shape:
        count *= n
    if count * dtype.itemsize != end - start:
        raise _bad(name, f"$.{key}: shape {list(entry.shape)} does not fill {end - start} bytes")
    array: npt.NDArray[Any] = np.frombuffer(body, dtype, count, start)
    return array.reshape(entry.shape)


def _bad(name: str, what: str) -> ArtifactError:
    return ArtifactError(what, where=name, remedy="compile the model again or fetch the calbin anew")
