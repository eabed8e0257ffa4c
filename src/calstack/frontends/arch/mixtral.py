"""`mixtral`: as mistral, with a mixture of experts in place of every MLP. GGUF files call it llama with experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from calstack.frontends import limits
from calstack.frontends.arch.family import Family, Fields
from calstack.specs import MoESpec

if TYPE_CHECKING:
    from calstack.frontends.metadata import Metadata

__all__ = ["FAMILY"]


def _moe(meta: Metadata, experts: str, used: str, width: str) -> Fields:
    moe = MoESpec(
        experts=meta.integer(experts, 1, limits.MAX_EXPERTS),
        top_k=meta.integer(used, 1, limits.MAX_EXPERTS),
        intermediate=meta.integer(width, 1, limits.MAX_WIDTH),
    )
    return {"moe": moe}


FAMILY = Family(
    model_type="mixtral",
    gguf_arch="llama",
    gguf_interleaved_qk=True,
    moe=True,
    sliding=True,
    config=lambda config: _moe(config, "num_local_experts", "num_experts_per_tok", "intermediate_size"),
    gguf=lambda meta: _moe(meta, "llama.expert_count", "llama.expert_used_count", "llama.feed_forward_length"),
    renames=(
        (".block_sparse_moe.", ".mlp."),
        (".w1.", ".gate_proj."),
        (".w3.", ".up_proj."),
        (".w2.", ".down_proj."),
    ),
)
