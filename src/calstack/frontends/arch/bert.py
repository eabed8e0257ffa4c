"""`bert`: an encoder. Learned positions and segments, layer norms after attention and MLP, GELU; optionally a sequence classifier."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from calstack.errors import UnsupportedError
from calstack.frontends import limits
from calstack.frontends.arch.family import Family, Fields
from calstack.frontends.reading import bad
from calstack.specs import Activation, EncoderSpec, NormKind

if TYPE_CHECKING:
    from calstack.frontends.metadata import Metadata

__all__ = ["FAMILY"]

_BIASED: Fields = {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "norm": NormKind.LAYER, "tied_embeddings": False}
_POOLINGS = {0: "none", 1: "mean", 2: "cls"}
_RANK = 4


def _config(config: Metadata) -> Fields:
    if config.text("position_embedding_type", "absolute") != "absolute" or config.flag("is_decoder", False):
        raise UnsupportedError("only encoders with absolute positions are supported", where=f"{config.path}: position_embedding_type")
    encoder = EncoderSpec(
        types=config.integer("type_vocab_size", 1, limits.MAX_TYPES),
        positions=config.integer("max_position_embeddings", 1, limits.MAX_CONTEXT),
        labels=_labels(config) if "BertForSequenceClassification" in (config.values.get("architectures") or ()) else (),
    )
    return {**_BIASED, "encoder": encoder}


def _labels(config: Metadata) -> tuple[str, ...]:
    named: Any = config.values.get("id2label") or {str(index): f"LABEL_{index}" for index in range(2)}
    if not isinstance(named, dict) or not 1 <= len(named) <= limits.MAX_LABELS:
        bad(config.path, "id2label", f"not an object of 1 to {limits.MAX_LABELS} names")
    labels = [named.get(str(index)) for index in range(len(named))]
    if not all(isinstance(label, str) for label in labels):
        bad(config.path, "id2label", "its keys are not the numbers from 0, or a name is no text")
    return tuple(str(label)[:200] for label in labels)


def _gguf(meta: Metadata) -> Fields:
    pooling = meta.integer("bert.pooling_type", 0, _RANK, 0)
    if pooling not in _POOLINGS and pooling != _RANK:
        raise UnsupportedError(f"pooling of type {pooling} is not supported", where=f"{meta.path}: bert.pooling_type")
    if meta.flag("bert.attention.causal", False):
        raise UnsupportedError("a causal encoder is not supported", where=f"{meta.path}: bert.attention.causal")
    how = _POOLINGS.get(pooling, "none")
    encoder = EncoderSpec(
        types=meta.integer("tokenizer.ggml.token_type_count", 1, limits.MAX_TYPES, 2),
        positions=meta.integer("bert.context_length", 1, limits.MAX_CONTEXT),
        labels=("score",) if pooling == _RANK else (),
        pooling=how,  # type: ignore[arg-type]  # one of the table's values
        normalise=how != "none",
    )
    return {**_BIASED, "encoder": encoder, "activation": Activation.GELU}


FAMILY = Family(
    model_type="bert",
    encoder=True,
    norms=frozenset({NormKind.LAYER}),
    activations=frozenset({Activation.GELU}),
    biases=frozenset({"qkv_bias", "o_bias", "mlp_bias"}),
    defaults=MappingProxyType({"hidden_act": "gelu", "rms_norm_eps": 1e-12, "type_vocab_size": 2}),
    config=_config,
    gguf=_gguf,
    renames=(("bert.", ""), (".gamma", ".weight"), (".beta", ".bias")),
    optional=("pooler.", "cls."),  # heads that a model without a classifier may carry along
    gguf_names=MappingProxyType(
        {
            "token_embd": "embeddings.word_embeddings",
            "position_embd": "embeddings.position_embeddings",
            "token_types": "embeddings.token_type_embeddings",
            "token_embd_norm": "embeddings.LayerNorm",
            "blk.*.attn_q": "encoder.layer.*.attention.self.query",
            "blk.*.attn_k": "encoder.layer.*.attention.self.key",
            "blk.*.attn_v": "encoder.layer.*.attention.self.value",
            "blk.*.attn_output": "encoder.layer.*.attention.output.dense",
            "blk.*.attn_output_norm": "encoder.layer.*.attention.output.LayerNorm",
            "blk.*.ffn_up": "encoder.layer.*.intermediate.dense",
            "blk.*.ffn_down": "encoder.layer.*.output.dense",
            "blk.*.layer_output_norm": "encoder.layer.*.output.LayerNorm",
            "cls": "pooler.dense",
            "cls.output": "classifier",
        }
    ),
)
