"""Writes small GGUF files, right or wrong on purpose."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from calstack.frontends.safetensors import read_safetensors

DATA = Path(__file__).resolve().parent.parent / "data"
GGML = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "Q3_K": 11,
    "BF16": 30,
}
U32, F32, BOOL, STRING, ARRAY, U64, I32 = 4, 6, 7, 8, 9, 10, 5


def string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(item: Any) -> bytes:
    """A typed metadata value: type code and bytes."""
    if isinstance(item, bool):
        return struct.pack("<I?", BOOL, item)
    if isinstance(item, int):
        return struct.pack("<II", U32, item)
    if isinstance(item, float):
        return struct.pack("<If", F32, item)
    if isinstance(item, str):
        return struct.pack("<I", STRING) + string(item)
    if isinstance(item, list) and isinstance(item[0], float):
        return struct.pack("<IIQ", ARRAY, F32, len(item)) + np.asarray(item, "<f4").tobytes()
    if isinstance(item, list) and isinstance(item[0], str):
        return struct.pack("<IIQ", ARRAY, STRING, len(item)) + b"".join(map(string, item))
    return struct.pack("<IIQ", ARRAY, I32, len(item)) + np.asarray(item, "<i4").tobytes()


def gguf_bytes(metadata: Mapping[str, Any], tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]], *, alignment: int = 32) -> bytes:
    """A whole GGUF version 3 file; tensors are name -> (kind, shape outermost first, bytes)."""
    out = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    out += [string(key) + value(item) for key, item in metadata.items()]
    data, offset = [], 0
    for name, (kind, shape, raw) in tensors.items():
        dims = struct.pack(f"<{len(shape)}Q", *shape[::-1])
        out.append(string(name) + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", GGML[kind], offset))
        padded = raw + bytes(-len(raw) % alignment)
        data.append(padded)
        offset += len(padded)
    head = b"".join(out)
    return head + bytes(-len(head) % alignment) + b"".join(data)


def quantise(kind: str, rows: np.ndarray) -> bytes:
    """Plain rounding to a kind: good enough to be different from the floats."""
    flat = np.ascontiguousarray(rows, np.float32)
    if kind == "F32":
        return flat.tobytes()
    if kind == "F16":
        return flat.astype(np.float16).tobytes()
    if kind == "BF16":
        return (flat.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return _QUANTISERS[kind](flat.reshape(-1, 32))


def _q8_0(blocks: np.ndarray) -> bytes:
    scale = (np.abs(blocks).max(1) / 127).astype(np.float16)
    codes = np.rint(blocks / np.maximum(scale.astype(np.float32), 1e-8)[:, None]).clip(-127, 127).astype(np.int8)
    return np.concatenate((scale[:, None].view(np.uint8), codes.view(np.uint8)), 1).tobytes()


def _nibbles(codes: np.ndarray) -> np.ndarray:
    packed: np.ndarray = (codes[:, :16] | (codes[:, 16:] << 4)).astype(np.uint8)
    return packed


def _q4_0(blocks: np.ndarray) -> bytes:
    scale = (np.abs(blocks).max(1) / 7).astype(np.float16)
    codes = (np.rint(blocks / np.maximum(scale.astype(np.float32), 1e-8)[:, None]) + 8).clip(0, 15).astype(np.uint8)
    return np.concatenate((scale[:, None].view(np.uint8), _nibbles(codes)), 1).tobytes()


def _q4_1(blocks: np.ndarray) -> bytes:
    low = blocks.min(1).astype(np.float16)
    scale = ((blocks.max(1) - blocks.min(1)) / 15).astype(np.float16)
    steps = (blocks - low.astype(np.float32)[:, None]) / np.maximum(scale.astype(np.float32), 1e-8)[:, None]
    codes = np.rint(steps).clip(0, 15).astype(np.uint8)
    return np.concatenate((scale[:, None].view(np.uint8), low[:, None].view(np.uint8), _nibbles(codes)), 1).tobytes()


_QUANTISERS: dict[str, Callable[[np.ndarray], bytes]] = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1}

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
_GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
ARCHS = {"mistral": "llama", "mixtral": "llama", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3"}


def gguf_name(name: str, *, gemma: bool = False) -> str:
    """The GGUF name of an HF parameter."""
    for long, short in (("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("lm_head", "output")):
        if name.startswith(long):
            return short + name[len(long) :]
    layer, rest = name.removeprefix("model.layers.").split(".", 1)
    stem, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{(_NAMES | _GEMMA if gemma else _NAMES)[stem]}.{kind}"


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """HF's halves order -> rotated pairs side by side, as converters write q and k of `llama`."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def tiny_parts(model: str, kind: str) -> tuple[dict[str, Any], dict[str, tuple[str, tuple[int, ...], bytes]]]:
    """Metadata and tensors of a tiny model of tests/data as a converter would write them; matrices in `kind`."""
    config = json.loads((DATA / model / "config.json").read_text())
    arch = ARCHS.get(config["model_type"], config["model_type"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]} if arch == "llama" else {}
    tensors = {}
    for name, values in _merged({n: t.float32() for n, t in read_safetensors(DATA / model / "model.safetensors").items()}).items():
        stem = name.split(".")[-2]
        written = interleave(values, heads[stem]) if stem in heads else values
        if arch == "gemma3" and "norm" in name:
            written = written + np.float32(1)
            if stem == "q_norm":  # the format has no place for a scale of its own
                written = written * np.float32((config["head_dim"] / config["query_pre_attn_scalar"]) ** 0.5)
        used = kind if written.ndim == 2 and not name.endswith("mlp.gate.weight") else "F32"
        tensors[gguf_name(name, gemma=arch == "gemma3")] = (used, written.shape, quantise(used, written))
    return _tiny_metadata(model, config, arch) | _further_metadata(config, arch), tensors


def _merged(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Experts of a layer stacked, as converters do; other weights as they are."""
    merged: dict[str, Any] = {}
    for name, values in weights.items():
        plain = name.replace(".block_sparse_moe.", ".mlp.")
        for old, new in ((".w1.", ".gate_proj."), (".w3.", ".up_proj."), (".w2.", ".down_proj.")):
            plain = plain.replace(old, new)
        head, experts, rest = plain.partition(".experts.")
        if experts:
            index, _, part = rest.partition(".")
            merged.setdefault(f"{head}.experts.{part}", {})[int(index)] = values
        else:
            merged[plain] = values
    return {n: np.stack([v[i] for i in sorted(v)]) if isinstance(v, dict) else v for n, v in merged.items()}


def _further_metadata(config: dict[str, Any], arch: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if experts := config.get("num_experts") or config.get("num_local_experts"):
        found |= {f"{arch}.expert_count": experts, f"{arch}.expert_used_count": config["num_experts_per_tok"]}
        found[f"{arch}.expert_feed_forward_length"] = config.get("moe_intermediate_size") or config["intermediate_size"]
    if arch == "gemma3":
        found |= {f"{arch}.attention.sliding_window": config["sliding_window"], f"{arch}.attention.sliding_window_pattern": 2}
        found |= {f"{arch}.rope.scaling.type": "linear", f"{arch}.rope.scaling.factor": 2.0}
        found[f"{arch}.final_logit_softcapping"] = config["final_logit_softcapping"]
    if arch == "phi3":
        found |= {f"{arch}.attention.sliding_window": config["sliding_window"]}
    return found


def _tiny_metadata(model: str, config: dict[str, Any], arch: str) -> dict[str, Any]:
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    tokenizer = json.loads((DATA / model / "tokenizer.json").read_text())
    vocabulary = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    special = {item["content"] for item in tokenizer["added_tokens"]}
    return {
        "general.architecture": arch,
        "general.name": model,
        "general.license": "apache-2.0",
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{arch}.rope.freq_base": rope["rope_theta"],
        f"{arch}.rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in vocabulary],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 3,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": json.loads((DATA / model / "tokenizer_config.json").read_text())["chat_template"],
    }


def write_tiny_gguf(path: Path, model: str = "tiny-llama", kind: str = "Q8_0", **changed: Any) -> Path:
    """A tiny model as a GGUF file. `changed` metadata replaces keys (dots as double underscores); None removes one."""
    metadata, tensors = tiny_parts(model, kind)
    for key, item in changed.items():
        metadata.pop(key.replace("__", "."), None)
        if item is not None:
            metadata[key.replace("__", ".")] = item
    path.write_bytes(gguf_bytes(metadata, tensors))
    return path
