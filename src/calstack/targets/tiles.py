"""What each call must hold in a chip's SRAM at once, from the program's own calls.

Weights stream through two blocks of sixteen outputs, one read while the other is used; keys and values through two tiles of 64 positions.
Beside them lie the activations of `ROWS` rows of a launch, in and out.
"""

from __future__ import annotations

from calstack.calbin.manifest import KVSpec
from calstack.calbin.packing import LANES, packed_bytes
from calstack.calbin.program import (
    Attention,
    Call,
    Classify,
    Embed,
    EncoderAttention,
    LayerNorm,
    Linear,
    LmHead,
    MoeCombine,
    MoeExperts,
    MoeRoute,
    NormAdd,
    NormLinear,
    QkNormRopeKv,
    RopeTable,
    Weight,
)

__all__ = ["ROWS", "rows_that_fit", "tile_bytes"]

ROWS = 64
KEYS = 64  # of an attention tile
_F32 = 4


def tile_bytes(call: Call, kv: KVSpec, rows: int = ROWS) -> int:
    """Bytes of the call's tile with so many rows."""
    fixed, each = _parts(call, kv)
    return fixed + rows * each


def rows_that_fit(call: Call, kv: KVSpec, sram_bytes: int) -> int:
    """Most rows whose tile the SRAM holds; 0 = not one."""
    fixed, each = _parts(call, kv)
    return max(sram_bytes - fixed, 0) // max(each, 1)


def _parts(call: Call, kv: KVSpec) -> tuple[int, int]:
    """Bytes whatever the rows, and bytes of a row."""
    match call:
        case NormLinear() | Linear() | LmHead() | MoeRoute():
            return _product(call.weight)
        case MoeExperts():
            return max(_product(call.weight), _product(call.down), key=lambda parts: parts[0] + ROWS * parts[1])
        case Attention():
            group = call.heads // call.kv_heads
            return 2 * KEYS * kv.dtype.position_bytes(call.head_dim), _F32 * group * (2 * call.head_dim + KEYS)
        case EncoderAttention():
            group = call.heads // call.kv_heads
            return 2 * KEYS * 2 * _F32 * call.head_dim, _F32 * group * (2 * call.head_dim + KEYS)
        case QkNormRopeKv():
            return 0, _F32 * ((call.heads + 2 * call.kv_heads) * call.head_dim + call.rope_dim)
        case Embed():
            return _product(call.weight)[0], _F32 * call.weight.k
        case Classify():
            return max(_product(call.weight), _product(call.head), key=lambda parts: parts[0] + ROWS * parts[1])
        case NormAdd() | LayerNorm():
            return _F32 * call.norm.n, 2 * _F32 * call.norm.n
        case RopeTable():
            return _F32 * call.inv_freq.n, 2 * _F32 * call.inv_freq.n
        case MoeCombine():
            return 0, _F32 * 3 * call.top_k
        case _:
            return 0, 0


def _product(weight: Weight) -> tuple[int, int]:
    block = packed_bytes(weight.format, LANES, weight.k, weight.group, weight.minimum)
    element = 1 if weight.group else _F32  # activations are int8 beside grouped weights
    return 2 * block, element * weight.k + _F32 * LANES
