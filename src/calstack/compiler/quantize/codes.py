"""Quantised weights between reading and packing: codes, scales and minima per group, in row order."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

__all__ = ["Codes", "join", "take_rows"]


@dataclasses.dataclass(frozen=True, slots=True)
class Codes:
    """`codes` [rows, groups, group]: u8 in 0..15 (w4) or i8 (w8); `scale` [rows, groups] f16; `minimum` alike, or None.

    w4 without minimum stands for `scale * (code - 8)`, with it for `scale * code + minimum`; w8 for `scale * code`.
    """

    codes: npt.NDArray[np.uint8] | npt.NDArray[np.int8]
    scale: npt.NDArray[np.float16]
    minimum: npt.NDArray[np.float16] | None

    @property
    def rows(self) -> int:
        """Outputs."""
        return int(self.codes.shape[0])

    def float32(self) -> npt.NDArray[np.float32]:
        """Dequantised value [rows, k], rounded as the product's definition rounds it."""
        scale = self.scale.astype(np.float32)[..., None]
        if self.codes.dtype == np.int8:
            value = scale * self.codes.astype(np.float32)
        elif self.minimum is None:
            value = scale * (self.codes.astype(np.float32) - np.float32(8))
        else:
            value = scale * self.codes.astype(np.float32) + self.minimum.astype(np.float32)[..., None]
        return value.reshape(self.rows, -1)


def join(parts: Sequence[Codes]) -> Codes:
    """Parts one under the other; all must have or lack a minimum."""
    if len(parts) == 1:
        return parts[0]
    minima = [p.minimum for p in parts if p.minimum is not None]
    assert len(minima) in {0, len(parts)}, "the policy gives all parts of a weight one form"
    return Codes(
        np.concatenate([p.codes for p in parts]),
        np.concatenate([p.scale for p in parts]),
        np.concatenate(minima) if minima else None,
    )


def take_rows(codes: Codes, index: npt.NDArray[np.intp]) -> Codes:
    """Rows in another order."""
    minimum = None if codes.minimum is None else codes.minimum[index]
    return Codes(codes.codes[index], codes.scale[index], minimum)
