"""`qwen3`: as llama, with an RMS norm of each query and key head before rope."""

from __future__ import annotations

from types import MappingProxyType

from calstack.frontends.arch.family import Family

__all__ = ["FAMILY"]

FAMILY = Family(
    model_type="qwen3",
    qk_norm=True,
    biases=frozenset({"qkv_bias", "o_bias"}),
    sliding=True,
    defaults=MappingProxyType({"use_sliding_window": False}),
)
