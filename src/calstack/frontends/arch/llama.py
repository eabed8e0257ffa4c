"""`llama`: RMS norms, rotary grouped-query attention, gated SiLU MLP."""

from __future__ import annotations

from calstack.frontends.arch.family import Family

__all__ = ["FAMILY"]

FAMILY = Family(
    model_type="llama",
    gguf_interleaved_qk=True,
    biases=frozenset({"qkv_bias", "o_bias", "mlp_bias"}),
)
