"""Sizes of packed weights: the arithmetic of layout `n16.v1` that writer, reader and cost model share."""

from __future__ import annotations

from calstack.calbin.program import Weight
from calstack.specs import WeightFormat

__all__ = ["BLOCK_POSITIONS", "LANES", "packed_bytes", "padded_rows", "weight_bytes"]

LANES = 16  # outputs of a packed block
BLOCK_POSITIONS = 64  # of a KV block, layout kv64.v1

_ELEMENT = {WeightFormat.F32: 4, WeightFormat.F16: 2, WeightFormat.BF16: 2}


def packed_bytes(fmt: WeightFormat, n: int, k: int, group: int, minimum: bool) -> int:
    """Bytes of an `[n, k]` weight in layout n16.v1; n is padded to whole blocks of 16."""
    blocks = -(-n // LANES)
    if fmt in _ELEMENT:
        return blocks * k * LANES * _ELEMENT[fmt]
    codes = group * (LANES if fmt is WeightFormat.W8A8 else LANES // 2)
    return blocks * (k // group) * (codes + LANES * 2 * (2 if minimum else 1))


def weight_bytes(weight: Weight) -> int:
    """Bytes of a program's weight."""
    return packed_bytes(weight.format, weight.n, weight.k, weight.group, weight.minimum)


def padded_rows(rows: int, lanes: int) -> int:
    """Rows that hold `rows` tokens of at most `lanes` lanes when every lane begins a KV block of its own."""
    return BLOCK_POSITIONS * (rows // BLOCK_POSITIONS + lanes)
