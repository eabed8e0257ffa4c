"""Inverse frequencies of rotary embeddings, computed in f64 and rounded once to f32."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from calstack.specs import RopeSpec

    Floats64 = npt.NDArray[np.float64]

__all__ = ["inverse_frequencies", "llama3_factors"]

# YaRN's published defaults; neither GGUF nor our HF reader accepts a model that sets others.
_BETA_FAST, _BETA_SLOW = 32.0, 1.0


def inverse_frequencies(rope: RopeSpec) -> npt.NDArray[np.float32]:
    """inv_freq [dim / 2]: the angle of pair i at position p is `p * inv_freq[i]`."""
    plain = rope.theta ** -(np.arange(0, rope.dim, 2, dtype=np.float64) / rope.dim)
    return _scaled(plain, rope).astype(np.float32)


def _scaled(plain: Floats64, rope: RopeSpec) -> Floats64:
    match rope.scaling:
        case "none":
            return plain
        case "linear":
            return plain / rope.factor
        case "llama3":
            return plain / llama3_factors(rope)
        case "yarn":
            return _yarn(plain, rope)


def llama3_factors(rope: RopeSpec) -> Floats64:
    """What llama3 scaling divides each plain frequency by, [dim / 2]: 1 for short wavelengths, `factor` for long ones."""
    plain = rope.theta ** -(np.arange(0, rope.dim, 2, dtype=np.float64) / rope.dim)
    turns = rope.original_context * plain / (2 * math.pi)
    smooth = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0)
    factors: Floats64 = 1.0 / ((1.0 - smooth) / rope.factor + smooth)
    return factors


def _yarn(plain: Floats64, rope: RopeSpec) -> Floats64:
    def pair_with(turns: float) -> float:
        return rope.dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(pair_with(_BETA_FAST)), 0)
    high = min(math.ceil(pair_with(_BETA_SLOW)), rope.dim - 1)
    ramp = np.clip((np.arange(rope.dim // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
    scaled: Floats64 = plain / rope.factor * ramp + plain * (1.0 - ramp)
    return scaled
