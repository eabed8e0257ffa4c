"""Stored blocks -> codes, bit for bit. Also the two conversions between block forms that lose nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from calstack.compiler.quantize.codes import Codes
from calstack.graph.blocks import split_q4_0, split_q4_1, split_q8_0

if TYPE_CHECKING:
    import numpy.typing as npt

    from calstack.graph.model import StoredTensor

__all__ = ["import_w4", "import_w8"]


def import_w4(tensor: StoredTensor, *, minimum: bool) -> Codes | None:
    """Q4_0 or Q4_1 as w4, with a minimum or without; None when the stored form cannot be kept exactly.

    `d * (q - 8)` equals `d * q + (-8 d)`, and -8 d is exact in f16 unless it overflows.
    """
    if tensor.kind == "Q4_1" and minimum:
        scale, low, codes = split_q4_1(tensor.stored())
        return Codes(codes, scale, low)
    if tensor.kind != "Q4_0":
        return None
    scale, codes = split_q4_0(tensor.stored())
    return _with_minimum(codes, scale) if minimum else Codes(codes, scale, None)


def import_w8(tensor: StoredTensor) -> Codes | None:
    """Q8_0 as it is, Q4_0 as codes -8..7; None for any other kind."""
    if tensor.kind == "Q8_0":
        scale, codes = split_q8_0(tensor.stored())
        return Codes(codes, scale, None)
    if tensor.kind == "Q4_0":
        scale, nibbles = split_q4_0(tensor.stored())
        return Codes((nibbles.astype(np.int8) - np.int8(8)), scale, None)
    return None


def _with_minimum(codes: npt.NDArray[np.uint8], scale: npt.NDArray[np.float16]) -> Codes | None:
    low = scale.astype(np.float32) * np.float32(-8)
    if np.abs(low).max(initial=0.0) > np.finfo(np.float16).max:
        return None
    return Codes(codes, scale, low.astype(np.float16))
