"""Writes a model as a Hugging Face directory of float weights: what our own quantiser starts from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save_file

if TYPE_CHECKING:
    from calstack.graph.model import GraphBundle
    from calstack.specs import ModelSpec


def write_hf(bundle: GraphBundle, directory: Path, dtype: Any = np.float32) -> Path:
    """A llama-like model's dequantised weights, config, tokenizer and template."""
    directory.mkdir(parents=True)
    weights = {name: np.ascontiguousarray(tensor.float32().astype(dtype)) for name, tensor in bundle.tensors.items()}
    save_file(weights, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(_config(bundle.spec)))
    (directory / "tokenizer.json").write_bytes(bundle.tokenizer_json)
    template = {"chat_template": bundle.chat_template, "add_bos_token": bundle.spec.add_bos}
    (directory / "tokenizer_config.json").write_text(json.dumps(template))
    return directory


def _config(spec: ModelSpec) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": spec.arch,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab,
        "max_position_embeddings": spec.context,
        "rope_parameters": {"rope_theta": spec.rope.theta, "rope_type": "default"},
        "rms_norm_eps": spec.norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": spec.tied_embeddings,
        "bos_token_id": spec.bos_ids[0] if spec.bos_ids else None,
        "eos_token_id": list(spec.eos_ids),
    }
