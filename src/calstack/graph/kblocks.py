"""Exact float values of ggml's other block kinds: read here, requantised by the compiler.

Layouts (little endian), as ggml defines them; `sc`, `m` are 6-bit integers per group of 32, eight to a block, packed in 12 bytes:

    Q5_0  f16 d, 4 bytes of fifth bits, 16 bytes of nibbles                            value = d * (q - 16)
    Q5_1  f16 d, f16 m, 4 bytes of fifth bits, 16 bytes of nibbles                     value = d * q + m
    Q4_K  f16 d, f16 dmin, sc and m, 128 bytes of nibbles                              value = d * sc * q - dmin * m
    Q5_K  f16 d, f16 dmin, sc and m, 32 bytes of fifth bits, 128 bytes of nibbles      value = d * sc * q - dmin * m
    Q6_K  128 bytes of nibbles, 64 bytes of upper bit pairs, 16 x i8 sc, f16 d         value = d * sc * (q - 32), groups of 16
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]
    Floats = npt.NDArray[np.float32]

__all__ = ["SUPERBLOCK", "decode_q4_k", "decode_q5_0", "decode_q5_1", "decode_q5_k", "decode_q6_k"]

SUPERBLOCK = 256
_HALVES = np.array([0, 4], np.uint8)


def _f16(raw: Bytes) -> Floats:
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _fives(bits: Bytes, nibbles: Bytes) -> Bytes:
    """5-bit codes [blocks, 32]."""
    high = np.unpackbits(bits, axis=-1, bitorder="little")
    low = np.concatenate((nibbles & 0x0F, nibbles >> 4), axis=-1)
    codes: Bytes = low | (high << np.uint8(4))
    return codes


def decode_q5_0(raw: Bytes) -> Floats:
    """Rows [rows, bytes per row] -> values [rows, values per row]."""
    blocks = raw.reshape(-1, 22)
    codes = _fives(blocks[:, 2:6], blocks[:, 6:]).astype(np.float32) - np.float32(16)
    return (_f16(blocks[:, :2]) * codes).reshape(raw.shape[0], -1)


def decode_q5_1(raw: Bytes) -> Floats:
    """Rows [rows, bytes per row] -> values [rows, values per row]."""
    blocks = raw.reshape(-1, 24)
    head = _f16(blocks[:, :4])
    codes = _fives(blocks[:, 4:8], blocks[:, 8:]).astype(np.float32)
    return (head[:, :1] * codes + head[:, 1:]).reshape(raw.shape[0], -1)


def _scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scale and minimum [blocks, 8, 1] of the groups of a K block, from its first 16 bytes."""
    head = _f16(blocks[:, :4])
    low, mid, high = (blocks[:, start : start + 4] for start in (4, 8, 12))
    scale = np.concatenate((low & 0x3F, (high & 0x0F) | ((low >> 2) & 0x30)), axis=-1)
    minimum = np.concatenate((mid & 0x3F, (high >> 4) | ((mid >> 2) & 0x30)), axis=-1)
    return (head[:, :1] * scale.astype(np.float32))[..., None], (head[:, 1:] * minimum.astype(np.float32))[..., None]


def _nibbles(raw: Bytes, width: int) -> Bytes:
    """Codes [blocks, n, 32]: the low halves of `width` bytes, then their high halves, and so on."""
    split: Bytes = raw.reshape(raw.shape[0], -1, 1, width) >> _HALVES.reshape(1, 1, 2, 1)
    return (split & np.uint8(0x0F)).reshape(raw.shape[0], -1, 32)


def decode_q4_k(raw: Bytes) -> Floats:
    """Rows [rows, bytes per row] -> values [rows, values per row]."""
    blocks = raw.reshape(-1, 144)
    scale, minimum = _scales(blocks)
    values = scale * _nibbles(blocks[:, 16:], 32).astype(np.float32) - minimum
    return values.reshape(raw.shape[0], -1)


def decode_q5_k(raw: Bytes) -> Floats:
    """Rows [rows, bytes per row] -> values [rows, values per row]."""
    blocks = raw.reshape(-1, 176)
    scale, minimum = _scales(blocks)
    fifth = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[None, :, None]) & np.uint8(1)
    codes = _nibbles(blocks[:, 48:], 32) | (fifth << np.uint8(4))
    return (scale * codes.astype(np.float32) - minimum).reshape(raw.shape[0], -1)


def decode_q6_k(raw: Bytes) -> Floats:
    """Rows [rows, bytes per row] -> values [rows, values per row]."""
    blocks = raw.reshape(-1, 210)
    scale = _f16(blocks[:, 208:]) * np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    pairs = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    upper = (pairs & np.uint8(3)).reshape(-1, 8, 32)
    codes = (_nibbles(blocks[:, :128], 64) | (upper << np.uint8(4))).astype(np.float32) - np.float32(32)
    return (scale[..., None] * codes.reshape(-1, 16, 16)).reshape(raw.shape[0], -1)
