"""Layout n16.v1: blocks of 16 outputs, inside a block the groups of K (drawn in native/include/calstack/kernels.h).

Rows are padded to whole blocks with zero codes and scales. `w8` codes are stored as code + 128, so padding is 128 there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from calstack.calbin.packing import LANES

if TYPE_CHECKING:
    import numpy.typing as npt

    from calstack.compiler.quantize.codes import Codes

    Bytes = npt.NDArray[np.uint8]

__all__ = ["gate_up_order", "pack_codes", "pack_floats"]


def pack_codes(weight: Codes) -> Bytes:
    """Flat bytes of a w4 or w8 weight."""
    codes = weight.codes
    packed = _pack_w8(codes) if codes.dtype == np.int8 else _pack_w4(codes)
    parts = [packed, _pack_halves(weight.scale)]
    if weight.minimum is not None:
        parts.append(_pack_halves(weight.minimum))
    return np.concatenate(parts, axis=2).reshape(-1)


def pack_floats(weight: npt.NDArray[np.generic]) -> Bytes:
    """Flat bytes of an f32, f16 or bf16 weight [n, k]: per block [k][16] elements."""
    n, k = weight.shape
    blocks = _whole_blocks(weight, n).reshape(-1, LANES, k)
    return np.ascontiguousarray(blocks.transpose(0, 2, 1)).reshape(-1).view(np.uint8)


def gate_up_order(outputs: int) -> npt.NDArray[np.intp]:
    """Row order of a gated weight made of `outputs` gate rows above `outputs` up rows: blocks of 16 gate and 16 up rows in turn."""
    gate = np.arange(outputs, dtype=np.intp).reshape(-1, 1, LANES)
    return np.concatenate([gate, gate + outputs], axis=1).reshape(-1)


def _whole_blocks(rows: npt.NDArray[np.generic], n: int) -> npt.NDArray[np.generic]:
    missing = -n % LANES
    if not missing:
        return rows
    return np.concatenate([rows, np.zeros((missing, *rows.shape[1:]), rows.dtype)])


def _pack_w4(codes: npt.NDArray[np.generic]) -> Bytes:
    """[n, groups, g] -> [blocks, groups, g * 8]: byte 64 j + 4 lane + b holds k = 8j + b (low half) and 8j + 4 + b."""
    n, groups, g = codes.shape
    split = _whole_blocks(codes, n).astype(np.uint8, copy=False).reshape(-1, LANES, groups, g // 8, 2, 4)
    both = split[..., 0, :] | (split[..., 1, :] << 4)  # [block, lane, group, j, b]
    return np.ascontiguousarray(both.transpose(0, 2, 3, 1, 4)).reshape(-1, groups, g * LANES // 2)


def _pack_w8(codes: npt.NDArray[np.generic]) -> Bytes:
    """[n, groups, g] -> [blocks, groups, g * 16]: byte 64 j + 4 lane + b holds k = 4j + b."""
    n, groups, g = codes.shape
    shifted = _whole_blocks(codes, n).view(np.uint8) ^ np.uint8(0x80)
    split = shifted.reshape(-1, LANES, groups, g // 4, 4)
    return np.ascontiguousarray(split.transpose(0, 2, 3, 1, 4)).reshape(-1, groups, g * LANES)


def _pack_halves(values: npt.NDArray[np.float16]) -> Bytes:
    """[n, groups] f16 -> [blocks, groups, 32] bytes."""
    n, groups = values.shape
    blocks = _whole_blocks(values, n).reshape(-1, LANES, groups)
    return np.ascontiguousarray(blocks.transpose(0, 2, 1)).view(np.uint8)
