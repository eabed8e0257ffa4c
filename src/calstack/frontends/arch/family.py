"""What an architecture adds to the shared decoder, as data."""

from __future__ import annotations

import dataclasses

from calstack.errors import UnsupportedError
from calstack.specs import Activation, ModelSpec, NormKind

__all__ = ["Family"]


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """One HF model type."""

    model_type: str
    qk_norm: bool = False
    gguf_interleaved_qk: bool = False  # GGUF stores rotated pairs of q and k rows side by side
    biases: frozenset[str] = frozenset()  # ModelSpec bias fields that may be set
    rope_scalings: frozenset[str] = frozenset({"none"})

    def check(self, spec: ModelSpec, where: str) -> None:
        """Raise UnsupportedError naming the first field of `spec` that this family's graphs do not express."""
        plain = {
            "norm": spec.norm is NormKind.RMS,
            "activation": spec.activation is Activation.SILU,
            "qk_norm": spec.qk_norm == self.qk_norm,
            "sliding_window": spec.sliding_window == 0 and spec.local_rope is None,
            "logit_softcap": spec.logit_softcap == 0.0,
            "post_norms": not spec.post_norms,
            "moe": spec.moe is None,
            "rope.scaling": spec.rope.scaling in self.rope_scalings,
        }
        plain |= {name: name in self.biases or not getattr(spec, name) for name in ("qkv_bias", "o_bias", "mlp_bias")}
        for field, good in plain.items():
            if not good:
                raise UnsupportedError(
                    f"{self.model_type} with this {field} is not supported",
                    where=where,
                    remedy="use a model without it, or follow the release notes for support",
                )
