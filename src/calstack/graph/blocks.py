"""How sources store weights: element and block kinds, their sizes, and their exact float values.

A block kind packs 32 consecutive values of a row (256 for the K kinds). Layouts (little endian) of those that are kept bit for bit, as
ggml defines them:

    Q8_0  f16 scale d, 32 x i8 q                 value = d * q
    Q4_0  f16 scale d, 16 bytes of nibbles q     value = d * (q - 8)
    Q4_1  f16 scale d, f16 minimum m, 16 bytes   value = d * q + m

The others are in kblocks.py. Byte j of the nibbles holds value j in its low half and value j + 16 in its high half.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from calstack.graph.kblocks import SUPERBLOCK, decode_q4_k, decode_q5_0, decode_q5_1, decode_q5_k, decode_q6_k

if TYPE_CHECKING:
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]
    Floats = npt.NDArray[np.float32]

__all__ = ["BLOCK", "KINDS", "Kind", "dequantise", "split_q4_0", "split_q4_1", "split_q8_0"]

BLOCK = 32


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """A storage kind: `block` consecutive values of a row take `bytes` bytes."""

    name: str
    block: int
    bytes: int
    decode: Callable[[Bytes], Floats]  # [rows, bytes per row] -> [rows, values per row]

    def row_bytes(self, k: int) -> int:
        """Bytes of a row of `k` values; `k` is a multiple of the block."""
        if k % self.block:
            raise ValueError(f"{self.name}: a row of {k} values is not whole blocks of {self.block}")
        return k // self.block * self.bytes


def _f16(raw: Bytes) -> Floats:
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _nibbles(raw: Bytes) -> Bytes:
    return np.concatenate((raw & 0x0F, raw >> 4), axis=-1)


def split_q8_0(raw: Bytes) -> tuple[npt.NDArray[np.float16], npt.NDArray[np.int8]]:
    """Rows of Q8_0 bytes -> scales [rows, groups] f16 and codes [rows, groups, 32] i8."""
    blocks = raw.reshape(raw.shape[0], -1, 34)
    return np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0], np.ascontiguousarray(blocks[..., 2:]).view(np.int8)


def split_q4_0(raw: Bytes) -> tuple[npt.NDArray[np.float16], npt.NDArray[np.uint8]]:
    """Rows of Q4_0 bytes -> scales [rows, groups] f16 and codes [rows, groups, 32] u8 in 0..15 (value = d * (q - 8))."""
    blocks = raw.reshape(raw.shape[0], -1, 18)
    return np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0], _nibbles(blocks[..., 2:])


def split_q4_1(raw: Bytes) -> tuple[npt.NDArray[np.float16], npt.NDArray[np.float16], npt.NDArray[np.uint8]]:
    """Rows of Q4_1 bytes -> scales and minima [rows, groups] f16, codes [rows, groups, 32] u8 in 0..15."""
    blocks = raw.reshape(raw.shape[0], -1, 20)
    head = np.ascontiguousarray(blocks[..., :4]).view(np.float16)
    return head[..., 0], head[..., 1], _nibbles(blocks[..., 4:])


def _decode_f32(raw: Bytes) -> Floats:
    return np.ascontiguousarray(raw).view(np.float32).copy()


def _decode_bf16(raw: Bytes) -> Floats:
    values: Floats = np.ascontiguousarray(raw).view(ml_dtypes.bfloat16).astype(np.float32)
    return values


# An f16 scale times a code of at most 8 bits is exact in f32, so each value below is rounded once at most.
def _decode_q8_0(raw: Bytes) -> Floats:
    d, q = split_q8_0(raw)
    return (d.astype(np.float32)[..., None] * q).astype(np.float32).reshape(raw.shape[0], -1)


def _decode_q4_0(raw: Bytes) -> Floats:
    d, q = split_q4_0(raw)
    return (d.astype(np.float32)[..., None] * (q.astype(np.float32) - 8.0)).reshape(raw.shape[0], -1)


def _decode_q4_1(raw: Bytes) -> Floats:
    d, m, q = split_q4_1(raw)
    values = d.astype(np.float32)[..., None] * q.astype(np.float32)
    values += m.astype(np.float32)[..., None]
    return values.reshape(raw.shape[0], -1)


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            Kind("F32", 1, 4, _decode_f32),
            Kind("F16", 1, 2, _f16),
            Kind("BF16", 1, 2, _decode_bf16),
            Kind("Q8_0", BLOCK, 34, _decode_q8_0),
            Kind("Q4_0", BLOCK, 18, _decode_q4_0),
            Kind("Q4_1", BLOCK, 20, _decode_q4_1),
            Kind("Q5_0", BLOCK, 22, decode_q5_0),
            Kind("Q5_1", BLOCK, 24, decode_q5_1),
            Kind("Q4_K", SUPERBLOCK, 144, decode_q4_k),
            Kind("Q5_K", SUPERBLOCK, 176, decode_q5_k),
            Kind("Q6_K", SUPERBLOCK, 210, decode_q6_k),
        )
    }
)

_ROWS_AT_ONCE = 1 << 22  # values decoded at once: bounds the temporaries to some tens of megabytes


def dequantise(kind: str, rows: Bytes, shape: tuple[int, ...]) -> Floats:
    """The float32 value, a new array of `shape`, of stored rows [rows, bytes per row] of `kind`."""
    decode = KINDS[kind].decode
    columns = shape[-1]
    out = np.empty((rows.shape[0], columns), np.float32)
    step = max(1, _ROWS_AT_ONCE // max(1, columns))
    for start in range(0, rows.shape[0], step):
        out[start : start + step] = decode(rows[start : start + step])
    return out.reshape(shape)
