"""`phi3`: as llama, rope over a part of each head where the config says so; q, k, v and gate, up are stored one above the other."""

from __future__ import annotations

from types import MappingProxyType

from calstack.frontends import limits
from calstack.frontends.arch.family import DECODER_GGUF, Family

__all__ = ["FAMILY"]

_QKV, _GATE_UP = "self_attn.qkv_proj", "mlp.gate_up_proj"

FAMILY = Family(
    model_type="phi3",
    sliding=True,
    gguf=lambda meta: {"sliding_window": meta.integer("phi3.attention.sliding_window", 0, limits.MAX_CONTEXT, 0)},
    gguf_names=MappingProxyType({**DECODER_GGUF, "blk.*.attn_qkv": f"model.layers.*.{_QKV}", "blk.*.ffn_up": f"model.layers.*.{_GATE_UP}"}),
    fused=MappingProxyType(
        {
            _QKV: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            _GATE_UP: ("mlp.gate_proj", "mlp.up_proj"),
        }
    ),
)
