"""Write a qwen3moe GGUF of few layers with random weights: the geometry of a config.json, the tokenizer of another GGUF file.

Usage: python tools/make_moe_gguf.py CONFIG.json TOKENIZER.gguf TARGET.gguf [--layers 4] [--type Q4_1]   (needs `gguf`)

Blocks are drawn directly (seed fixed), so that gigabytes take seconds: codes uniform, one scale per tensor, minima that centre them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

SPREAD = 0.02  # standard deviation of the weights
STEP = SPREAD / np.sqrt((16**2 - 1) / 12)  # of uniform 4-bit codes
Bytes = npt.NDArray[np.uint8]


def blocks(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> Bytes:
    """Random Q4_0 or Q4_1 blocks of a tensor, [..., bytes per row]."""
    count = shape[-1] // 32
    head = np.array([STEP] if kind == "Q4_0" else [STEP, -7.5 * STEP], np.float16).view(np.uint8)
    out = np.empty((*shape[:-1], count, len(head) + 16), np.uint8)
    out[..., : len(head)] = head
    out[..., len(head) :] = rng.integers(0, 256, (*shape[:-1], count, 16), np.uint8)
    return out.reshape(*shape[:-1], -1)


def copy_tokenizer(source: GGUFReader, writer: GGUFWriter) -> int:
    """Copy every tokenizer field; gives the size of the vocabulary."""
    for field in source.fields.values():
        if field.name.startswith("tokenizer."):
            kind = field.types[0]
            writer.add_key_value(field.name, field.contents(), kind, sub_type=field.types[-1] if kind == GGUFValueType.ARRAY else None)
    return len(source.fields["tokenizer.ggml.tokens"].data)


def describe(writer: GGUFWriter, config: dict[str, Any], layers: int, vocab: int) -> None:
    """The architecture's fields."""
    writer.add_name("random qwen3moe")
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_vocab_size(vocab)


def add_tensors(writer: GGUFWriter, config: dict[str, Any], layers: int, vocab: int, kind: str) -> None:
    """Every tensor of the model."""
    rng = np.random.default_rng(1)
    hidden, inner, experts = config["hidden_size"], config["moe_intermediate_size"], config["num_experts"]
    q, kv, dim = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))

    def matrix(name: str, *shape: int) -> None:
        writer.add_tensor(f"{name}.weight", blocks(rng, shape, kind), raw_dtype=GGMLQuantizationType[kind])

    def floats(name: str, *shape: int, around: float = 1.0) -> None:
        writer.add_tensor(f"{name}.weight", (around + SPREAD * rng.standard_normal(shape)).astype(np.float32))

    matrix("token_embd", vocab, hidden)
    for layer in range(layers):
        at = f"blk.{layer}."
        floats(f"{at}attn_norm", hidden)
        for name, heads in (("attn_q", q), ("attn_k", kv), ("attn_v", kv)):
            matrix(at + name, heads * dim, hidden)
        floats(f"{at}attn_q_norm", dim)
        floats(f"{at}attn_k_norm", dim)
        matrix(f"{at}attn_output", hidden, q * dim)
        floats(f"{at}ffn_norm", hidden)
        floats(f"{at}ffn_gate_inp", experts, hidden, around=0.0)
        matrix(f"{at}ffn_gate_exps", experts, inner, hidden)
        matrix(f"{at}ffn_up_exps", experts, inner, hidden)
        matrix(f"{at}ffn_down_exps", experts, hidden, inner)
    floats("output_norm", hidden)
    matrix("output", vocab, hidden)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--type", choices=("Q4_0", "Q4_1"), default="Q4_1")
    options = parser.parse_args()
    config = json.loads(options.config.read_text())
    writer = GGUFWriter(options.target, "qwen3moe", use_temp_file=False)
    vocab = copy_tokenizer(GGUFReader(options.tokenizer), writer)
    describe(writer, config, options.layers, vocab)
    add_tensors(writer, config, options.layers, vocab, options.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
