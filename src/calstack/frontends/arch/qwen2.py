"""`qwen2`: as llama, with biases on q, k and v."""

from __future__ import annotations

from types import MappingProxyType

from calstack.frontends.arch.family import Family

__all__ = ["FAMILY"]

FAMILY = Family(
    model_type="qwen2",
    biases=frozenset({"qkv_bias"}),
    sliding=True,
    defaults=MappingProxyType({"use_sliding_window": False}),
    config=lambda _: {"qkv_bias": True, "o_bias": False},
)
