"""The decoder that `llama` and `qwen3` share, as modules that trace to the canonical graph (`calstack/graph/model.py`).

Module and parameter names are HF's, so that initializer names come out by construction.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
from onnxscript import nn

from calstack.frontends.arch.rope import inverse_frequencies
from calstack.graph.names import INV_FREQ

if TYPE_CHECKING:
    from collections.abc import Sequence

    from onnxscript._internal.builder import OpBuilder  # the only place that names the type

    from calstack.specs import ModelSpec, RopeSpec

__all__ = ["CausalLM", "Past"]


@dataclasses.dataclass(frozen=True, slots=True)
class Past:
    """K and V of one layer, [batch, kv_heads, positions, head_dim]."""

    k: ir.Value
    v: ir.Value


def f32(number: float) -> float:
    """The number as an ONNX attribute holds it, so that a graph is the same before and after it was a file."""
    return float(np.float32(number))


class Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter([outputs, inputs])
        self.bias = nn.Parameter([outputs]) if bias else None

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        y = op.MatMul(x, op.Transpose(self.weight, perm=[1, 0]))
        return y if self.bias is None else op.Add(y, self.bias)


class Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = f32(eps)
        self.weight = nn.Parameter([width])

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        return op.RMSNormalization(x, self.weight, axis=-1, epsilon=self.eps)


class Embedding(nn.Module):
    def __init__(self, vocab: int, hidden: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter([vocab, hidden])

    def forward(self, op: OpBuilder, ids: ir.Value) -> ir.Value:
        x = op.Gather(self.weight, ids, axis=0)
        return x if self.scale == 1.0 else op.Mul(x, self.scale)


class RotaryTable(nn.Module):
    """cos and sin [batch, q_len, dim / 2] of the positions; one per model."""

    def __init__(self, rope: RopeSpec) -> None:
        super().__init__()
        self.attention_factor = rope.attention_factor
        data = ir.tensor(inverse_frequencies(rope))
        self.inv_freq = nn.Parameter([rope.dim // 2], data=data, name=INV_FREQ)

    def forward(self, op: OpBuilder, positions: ir.Value) -> tuple[ir.Value, ir.Value]:
        column = op.Unsqueeze(op.Cast(positions, to=ir.DataType.FLOAT), [-1])
        angle = op.Mul(column, self.inv_freq)
        cos, sin = op.Cos(angle), op.Sin(angle)
        if self.attention_factor == 1.0:
            return cos, sin
        return op.Mul(cos, self.attention_factor), op.Mul(sin, self.attention_factor)


class HeadNorm(Norm):
    """RMS normalisation of each head of [batch, q_len, heads * head_dim]."""

    def __init__(self, heads: int, head_dim: int, eps: float) -> None:
        super().__init__(head_dim, eps)
        self.heads, self.head_dim = heads, head_dim

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        split = op.Reshape(x, [0, 0, self.heads, self.head_dim])
        return op.Reshape(super().forward(op, split), [0, 0, self.heads * self.head_dim])


class SelfAttention(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        q_width, kv_width = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.q_proj = Linear(spec.hidden, q_width, bias=spec.qkv_bias)
        self.k_proj = Linear(spec.hidden, kv_width, bias=spec.qkv_bias)
        self.v_proj = Linear(spec.hidden, kv_width, bias=spec.qkv_bias)
        self.o_proj = Linear(q_width, spec.hidden, bias=spec.o_bias)
        self.q_norm = HeadNorm(spec.heads, spec.head_dim, spec.norm_eps) if spec.qk_norm else None
        self.k_norm = HeadNorm(spec.kv_heads, spec.head_dim, spec.norm_eps) if spec.qk_norm else None

    def _rotate(self, op: OpBuilder, x: ir.Value, table: tuple[ir.Value, ir.Value], heads: int) -> ir.Value:
        partial = {} if self.spec.rope.dim == self.spec.head_dim else {"rotary_embedding_dim": self.spec.rope.dim}
        return op.RotaryEmbedding(x, *table, num_heads=heads, **partial)

    def forward(self, op: OpBuilder, x: ir.Value, table: tuple[ir.Value, ir.Value], past: Past) -> tuple[ir.Value, Past]:
        spec = self.spec
        q, k, v = self.q_proj(op, x), self.k_proj(op, x), self.v_proj(op, x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(op, q), self.k_norm(op, k)
        q, k = self._rotate(op, q, table, spec.heads), self._rotate(op, k, table, spec.kv_heads)
        capped = {"softcap": f32(spec.attn_softcap)} if spec.attn_softcap else {}
        y, k_all, v_all = op.Attention(
            q,
            k,
            v,
            None,
            past.k,
            past.v,
            is_causal=1,
            scale=f32(spec.scale),
            q_num_heads=spec.heads,
            kv_num_heads=spec.kv_heads,
            _outputs=3,
            **capped,
        )
        return self.o_proj(op, y), Past(k_all, v_all)


class GatedMLP(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate_proj = Linear(spec.hidden, spec.intermediate, bias=spec.mlp_bias)
        self.up_proj = Linear(spec.hidden, spec.intermediate, bias=spec.mlp_bias)
        self.down_proj = Linear(spec.intermediate, spec.hidden, bias=spec.mlp_bias)

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        gate, up = self.gate_proj(op, x), self.up_proj(op, x)
        return self.down_proj(op, op.Mul(op.Mul(gate, op.Sigmoid(gate)), up))


class Layer(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.input_layernorm = Norm(spec.hidden, spec.norm_eps)
        self.self_attn = SelfAttention(spec)
        self.post_attention_layernorm = Norm(spec.hidden, spec.norm_eps)
        self.mlp = GatedMLP(spec)

    def forward(self, op: OpBuilder, x: ir.Value, table: tuple[ir.Value, ir.Value], past: Past) -> tuple[ir.Value, Past]:
        y, present = self.self_attn(op, self.input_layernorm(op, x), table, past)
        x = op.Add(x, y)
        return op.Add(x, self.mlp(op, self.post_attention_layernorm(op, x))), present


class Backbone(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.embed_tokens = Embedding(spec.vocab, spec.hidden, spec.embed_scale)
        self.rotary_emb = RotaryTable(spec.rope)
        self.layers = nn.ModuleList([Layer(spec) for _ in range(spec.layers)])
        self.norm = Norm(spec.hidden, spec.norm_eps)

    def forward(self, op: OpBuilder, ids: ir.Value, positions: ir.Value, past: Sequence[Past]) -> tuple[ir.Value, list[Past]]:
        x = self.embed_tokens(op, ids)
        table = self.rotary_emb(op, positions)
        present: list[Past] = []
        for layer, old in zip(self.layers, past, strict=True):
            x, new = layer(op, x, table, old)
            present.append(new)
        return self.norm(op, x), present


class CausalLM(nn.Module):
    """ids and positions [batch, q_len] -> logits [batch, q_len, vocab] and each layer's grown past."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.model = Backbone(spec)
        self.lm_head = None if spec.tied_embeddings else Linear(spec.hidden, spec.vocab)

    def forward(self, op: OpBuilder, ids: ir.Value, positions: ir.Value, past: Sequence[Past]) -> tuple[ir.Value, list[Past]]:
        x, present = self.model(op, ids, positions, past)
        if self.lm_head is not None:
            return self.lm_head(op, x), present
        return op.MatMul(x, op.Transpose(self.model.embed_tokens.weight, perm=[1, 0])), present
