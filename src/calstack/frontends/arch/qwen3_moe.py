"""`qwen3_moe`: as qwen3, with a mixture of experts in place of every MLP."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from calstack.errors import UnsupportedError
from calstack.frontends import limits
from calstack.frontends.arch.family import Family, Fields
from calstack.specs import MoESpec

if TYPE_CHECKING:
    from calstack.frontends.metadata import Metadata

__all__ = ["FAMILY"]


def _config(config: Metadata) -> Fields:
    if config.values.get("mlp_only_layers") or config.integer("decoder_sparse_step", 1, limits.MAX_LAYERS, 1) != 1:
        raise UnsupportedError("layers without experts among those with are not supported", where=f"{config.path}: mlp_only_layers")
    moe = MoESpec(
        experts=config.integer("num_local_experts" if "num_local_experts" in config else "num_experts", 1, limits.MAX_EXPERTS),
        top_k=config.integer("num_experts_per_tok", 1, limits.MAX_EXPERTS),
        intermediate=config.integer("moe_intermediate_size", 1, limits.MAX_WIDTH),
        renormalise=config.flag("norm_topk_prob", False),
    )
    return {"moe": moe}


def _gguf(meta: Metadata) -> Fields:
    moe = MoESpec(
        experts=meta.integer("qwen3moe.expert_count", 1, limits.MAX_EXPERTS),
        top_k=meta.integer("qwen3moe.expert_used_count", 1, limits.MAX_EXPERTS),
        intermediate=meta.integer("qwen3moe.expert_feed_forward_length", 1, limits.MAX_WIDTH),
    )
    return {"moe": moe}


FAMILY = Family(
    model_type="qwen3_moe",
    gguf_arch="qwen3moe",
    qk_norm=True,
    biases=frozenset({"qkv_bias", "o_bias"}),
    moe=True,
    sliding=True,
    defaults=MappingProxyType({"use_sliding_window": False}),
    config=_config,
    gguf=_gguf,
)
