"""config.json of a Hugging Face model -> ModelSpec."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from calstack.errors import UnsupportedError
from calstack.frontends import limits
from calstack.frontends.arch import family_of
from calstack.frontends.hf_window import window_fields
from calstack.frontends.metadata import Metadata
from calstack.frontends.reading import bad
from calstack.specs import Activation, ModelSpec, RopeSpec

__all__ = ["generation_of", "spec_of"]

_ACTIVATIONS = {"silu": Activation.SILU, "swish": Activation.SILU, "gelu_pytorch_tanh": Activation.GELU_TANH, "gelu": Activation.GELU}
_YARN_DEFAULTS = {"beta_fast": 32, "beta_slow": 1, "truncate": True, "mscale": None, "mscale_all_dim": None}


def spec_of(config: Metadata, *, name: str) -> ModelSpec:
    """The model that a config describes; tokens and `add_bos` are completed by the caller from the tokenizer."""
    path = config.path
    model_type = config.text("model_type")
    family = family_of(model_type, f"{path}: model_type")
    config = Metadata(path, {**family.defaults, **config.values}, config.prefix)
    _refuse_variants(config)
    hidden = config.integer("hidden_size", 1, limits.MAX_WIDTH)
    heads = config.integer("num_attention_heads", 1, limits.MAX_HEADS)
    head_dim = config.integer("head_dim", 2, limits.MAX_HEAD_DIM, max(2, hidden // heads))
    vocab = config.integer("vocab_size", 1, limits.MAX_VOCAB)
    bias = config.flag("attention_bias", False)
    layers, context = (
        config.integer("num_hidden_layers", 1, limits.MAX_LAYERS),
        config.integer("max_position_embeddings", 1, limits.MAX_CONTEXT),
    )
    fields: dict[str, Any] = {
        "arch": model_type,
        "name": name,
        "layers": layers,
        "hidden": hidden,
        "intermediate": config.integer("intermediate_size", 1, limits.MAX_WIDTH),
        "heads": heads,
        "kv_heads": config.integer("num_key_value_heads", 1, limits.MAX_HEADS, heads),
        "head_dim": head_dim,
        "vocab": vocab,
        "context": context,
        "rope": _rope(config, head_dim),
        "norm_eps": config.number("layer_norm_eps" if family.encoder and "layer_norm_eps" in config else "rms_norm_eps", 1e-12, 1.0),
        "activation": _activation(config),
        "qk_norm": family.qk_norm,
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": config.flag("mlp_bias", False),
        "tied_embeddings": config.flag("tie_word_embeddings", False),
        "bos_ids": token_ids(config, "bos_token_id", vocab),
        "eos_ids": token_ids(config, "eos_token_id", vocab),
        "pad_id": next(iter(token_ids(config, "pad_token_id", vocab)), None),
    }
    spec = ModelSpec(**(fields | window_fields(config, layers, context, head_dim) | family.config(config)))
    limits.check_relations(spec, path)
    return spec


def token_ids(meta: Metadata, key: str, vocab: int) -> tuple[int, ...]:
    """One id, a list of ids, or none (null, missing, -1)."""
    value = meta.values.get(key)
    ids = value if isinstance(value, list) else [] if value in (None, -1) else [value]
    for item in ids:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < vocab:
            bad(meta.path, meta.prefix + key, f"{str(item)[:40]} is not a token of the vocabulary of {vocab}")
    return tuple(dict.fromkeys(ids))


def _refuse_variants(config: Metadata) -> None:
    if config.values.get("use_bidirectional_attention"):
        _unsupported(config, "use_bidirectional_attention", "a decoder that attends to later tokens is not supported")
    if config.values.get("quantization_config") is not None:
        _unsupported(config, "quantization_config", "a quantised checkpoint is not supported", "use the unquantised checkpoint or a GGUF")


def _unsupported(config: Metadata, key: str, what: str, remedy: str = "") -> None:
    raise UnsupportedError(what, where=f"{config.path}: {config.prefix}{key}", remedy=remedy)


def _activation(config: Metadata) -> Activation:
    key = "hidden_activation" if "hidden_activation" in config else "hidden_act"
    name = config.text(key, "silu")
    if name not in _ACTIVATIONS:
        _unsupported(config, key, f"the activation {name[:32]!r} is not supported", f"supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _rope(config: Metadata, head_dim: int) -> RopeSpec:
    """`rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before)."""
    rope = config.section("rope_parameters" if "rope_parameters" in config else "rope_scaling")
    if "full_attention" in rope:  # one rope for layers of each kind
        rope = rope.section("full_attention")
    theta = (rope if "rope_theta" in rope else config).number("rope_theta", 1.0, 1e12, 10000.0)
    partial = (rope if "partial_rotary_factor" in rope else config).number("partial_rotary_factor", 1e-3, 1.0, 1.0)
    kind = rope.text("rope_type", rope.text("type", "default"))
    fields: dict[str, Any] = {"theta": theta, "dim": int(head_dim * partial)}
    match kind:
        case "default":
            return RopeSpec(**fields)
        case "linear":
            return RopeSpec(**fields, scaling="linear", factor=rope.number("factor", 1e-3, 1e6))
        case "llama3":
            return _llama3(rope, fields)
        case "yarn":
            return _yarn(config, rope, fields)
        case _:
            raise UnsupportedError(f"the rope type {kind[:32]!r} is not supported", where=f"{config.path}: {rope.prefix}rope_type")


def _llama3(rope: Metadata, fields: dict[str, Any]) -> RopeSpec:
    return RopeSpec(
        **fields,
        scaling="llama3",
        factor=rope.number("factor", 1.0, 1e6),
        low_freq_factor=rope.number("low_freq_factor", 1e-3, 1e6),
        high_freq_factor=rope.number("high_freq_factor", 1e-3, 1e6),
        original_context=rope.integer("original_max_position_embeddings", 1, limits.MAX_CONTEXT),
    )


def _yarn(config: Metadata, rope: Metadata, fields: dict[str, Any]) -> RopeSpec:
    for key, value in _YARN_DEFAULTS.items():
        if rope.values.get(key, value) != value:
            _unsupported(rope, key, f"yarn with {key} other than {value} is not supported")
    factor = rope.number("factor", 1.0, 1e6)
    context = config.integer("max_position_embeddings", 1, limits.MAX_CONTEXT)
    return RopeSpec(
        **fields,
        scaling="yarn",
        factor=factor,
        original_context=rope.integer("original_max_position_embeddings", 1, limits.MAX_CONTEXT, context),
        attention_factor=rope.number("attention_factor", 1e-3, 1e3, 0.1 * math.log(factor) + 1.0),
    )


def generation_of(meta: Metadata, spec: ModelSpec) -> tuple[dict[str, object], tuple[int, ...]]:
    """Generation defaults (HF names) and the ids that end a generation, from generation_config.json."""
    ends = token_ids(meta, "eos_token_id", spec.vocab) or spec.eos_ids
    found: dict[str, object] = {"eos_token_id": list(ends)}
    for key, low, high in (("temperature", 0.0, 1e3), ("top_p", 0.0, 1.0), ("min_p", 0.0, 1.0), ("repetition_penalty", 1e-3, 1e3)):
        if key in meta:
            found[key] = meta.number(key, low, high)
    if "top_k" in meta:
        found["top_k"] = meta.integer("top_k", 0, limits.MAX_VOCAB)
    if "do_sample" in meta:
        found["do_sample"] = meta.flag("do_sample")
    return found, ends


def empty(path: Path) -> Metadata:
    """Metadata of a file that is not there."""
    return Metadata(path, {})
