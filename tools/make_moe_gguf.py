"""Write a qwen3moe GGUF of few layers with random weights: the geometry of a config.json, the tokenizer of another GGUF file.

Usage: python tools/make_moe_gguf.py CONFIG.json TOKENIZER.gguf TARGET.gguf [--layers 4] [--type Q4_1]   (needs `gguf`)

Blocks are drawn directly (seed fixed), so that gigabytes take seconds: codes uniform, one scale per tensor, minima that centre them.
Memory holds one tensor at a time.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import quant_shape_to_byte_shape

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


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor to come: in blocks of `kind`, or f32 around a value."""

    name: str
    shape: tuple[int, ...]
    kind: str = "F32"
    around: float = 0.0

    @property
    def stored(self) -> tuple[int, ...]:
        """Shape of the bytes (blocks) or of the floats."""
        return self.shape if self.kind == "F32" else quant_shape_to_byte_shape(self.shape, GGMLQuantizationType[self.kind])

    @property
    def bytes(self) -> int:
        """Size in the file."""
        return math.prod(self.stored) * (4 if self.kind == "F32" else 1)

    def draw(self, rng: np.random.Generator) -> npt.NDArray[Any]:
        """Its values."""
        if self.kind == "F32":
            return (self.around + SPREAD * rng.standard_normal(self.shape)).astype(np.float32)
        return blocks(rng, self.shape, self.kind)


def tensors(config: dict[str, Any], layers: int, vocab: int, kind: str) -> Iterator[Tensor]:
    """Every tensor of the model, in the order of the file."""
    hidden, inner, experts = config["hidden_size"], config["moe_intermediate_size"], config["num_experts"]
    q, kv, dim = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    yield Tensor("token_embd.weight", (vocab, hidden), kind)
    for layer in range(layers):
        at = f"blk.{layer}."
        yield Tensor(f"{at}attn_norm.weight", (hidden,), around=1.0)
        for name, heads in (("attn_q", q), ("attn_k", kv), ("attn_v", kv)):
            yield Tensor(f"{at}{name}.weight", (heads * dim, hidden), kind)
        yield Tensor(f"{at}attn_q_norm.weight", (dim,), around=1.0)
        yield Tensor(f"{at}attn_k_norm.weight", (dim,), around=1.0)
        yield Tensor(f"{at}attn_output.weight", (hidden, q * dim), kind)
        yield Tensor(f"{at}ffn_norm.weight", (hidden,), around=1.0)
        yield Tensor(f"{at}ffn_gate_inp.weight", (experts, hidden))
        yield Tensor(f"{at}ffn_gate_exps.weight", (experts, inner, hidden), kind)
        yield Tensor(f"{at}ffn_up_exps.weight", (experts, inner, hidden), kind)
        yield Tensor(f"{at}ffn_down_exps.weight", (experts, hidden, inner), kind)
    yield Tensor("output_norm.weight", (hidden,), around=1.0)
    yield Tensor("output.weight", (vocab, hidden), kind)


def write_tensors(writer: GGUFWriter, wanted: Sequence[Tensor]) -> None:
    """The header with every tensor's place, then their bytes one after the other."""
    for t in wanted:
        raw = None if t.kind == "F32" else GGMLQuantizationType[t.kind]
        writer.add_tensor_info(t.name, t.stored, np.dtype(np.float32 if raw is None else np.uint8), t.bytes, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(1)
    for t in wanted:
        writer.write_tensor_data(t.draw(rng))


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
    write_tensors(writer, list(tensors(config, options.layers, vocab, options.type)))
    writer.close()


if __name__ == "__main__":
    main()
