"""`gemma3_text`: norms after attention and MLP as well as before, each head normed, sliding layers with a rope of their own, GELU."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from calstack.errors import UnsupportedError
from calstack.frontends import limits
from calstack.frontends.arch.family import DECODER_GGUF, Family, Fields
from calstack.specs import Activation, NormKind, RopeSpec

if TYPE_CHECKING:
    from calstack.frontends.metadata import Metadata

__all__ = ["FAMILY"]

_EVERY = 6  # one layer in six attends to everything, where the file does not say
_LOCAL_THETA = 10000.0
_LAYERS_OF_27B = 62  # whose queries are scaled by hidden / heads; GGUF files do not say so


def _config(config: Metadata) -> Fields:
    hidden = config.integer("hidden_size", 1, limits.MAX_WIDTH)
    if "attn_logit_softcapping" in config:  # the config has the field, the model never read it
        raise UnsupportedError("a soft cap on attention is not supported", where=f"{config.path}: attn_logit_softcapping")
    scalar = config.number("query_pre_attn_scalar", 1e-6, 1e6, 256.0)
    return {
        "norm": NormKind.RMS_PLUS_ONE,
        "post_norms": True,
        "embed_scale": hidden**0.5,
        "attn_scale": scalar**-0.5,
        "logit_softcap": config.number("final_logit_softcapping", 0.0, 1e6, 0.0),
    }


def _gguf(meta: Metadata) -> Fields:
    hidden = meta.integer("gemma3.embedding_length", 1, limits.MAX_WIDTH)
    heads = meta.integer("gemma3.attention.head_count", 1, limits.MAX_HEADS)
    head_dim = meta.integer("gemma3.attention.key_length", 2, limits.MAX_HEAD_DIM, max(2, hidden // heads))
    largest = meta.integer("gemma3.block_count", 1, limits.MAX_LAYERS) == _LAYERS_OF_27B
    return {
        "norm": NormKind.RMS,  # the file's norm weights hold the one
        "post_norms": True,
        "activation": Activation.GELU_TANH,
        "embed_scale": hidden**0.5,
        "attn_scale": (hidden / heads if largest else head_dim) ** -0.5,
        "sliding_window": meta.integer("gemma3.attention.sliding_window", 1, limits.MAX_CONTEXT),
        "full_attention_every": meta.integer("gemma3.attention.sliding_window_pattern", 1, limits.MAX_LAYERS, _EVERY),
        "local_rope": RopeSpec(theta=meta.number("gemma3.rope.freq_base_swa", 1.0, 1e12, _LOCAL_THETA), dim=head_dim),
        "logit_softcap": meta.number("gemma3.final_logit_softcapping", 0.0, 1e6, 0.0),
    }


FAMILY = Family(
    model_type="gemma3_text",
    gguf_arch="gemma3",
    qk_norm=True,
    norms=frozenset({NormKind.RMS, NormKind.RMS_PLUS_ONE}),
    activations=frozenset({Activation.GELU_TANH}),
    sliding=True,
    post_norms=True,
    softcaps=True,
    defaults=MappingProxyType(
        {
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "sliding_window": 4096,
            "sliding_window_pattern": _EVERY,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": _LOCAL_THETA,
            "rms_norm_eps": 1e-6,
        }
    ),
    config=_config,
    gguf=_gguf,
    gguf_names=MappingProxyType(
        {
            **DECODER_GGUF,
            "blk.*.post_attention_norm": "model.layers.*.post_attention_layernorm",
            "blk.*.ffn_norm": "model.layers.*.pre_feedforward_layernorm",
            "blk.*.post_ffw_norm": "model.layers.*.post_feedforward_layernorm",
        }
    ),
)
