"""The decoder that all decoder families share, as modules that trace to the canonical graph (`calstack/graph/model.py`).

Module and parameter names are HF's, so that initializer names come out by construction.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
from onnxscript import nn

from calstack.frontends.arch.rope import inverse_frequencies
from calstack.graph.moe import moe_function
from calstack.graph.names import INV_FREQ, LOCAL_INV_FREQ
from calstack.specs import Activation, NormKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from onnxscript._internal.builder import OpBuilder  # the only place that names the type

    from calstack.specs import ModelSpec, MoESpec, RopeSpec

__all__ = ["CausalLM", "Linear", "Past", "activate", "f32"]


@dataclasses.dataclass(frozen=True, slots=True)
class Past:
    """K and V of one layer, [batch, kv_heads, positions, head_dim]."""

    k: ir.Value
    v: ir.Value


@dataclasses.dataclass(frozen=True, slots=True)
class Positions:
    """What layers of one kind (full or sliding) share: the rope table and, with a window, the mask."""

    cos: ir.Value
    sin: ir.Value
    mask: ir.Value | None


def f32(number: float) -> float:
    """The number as an ONNX attribute holds it, so that a graph is the same before and after it was a file."""
    return float(np.float32(number))


class Linear(nn.Module):
    """A product with a weight [outputs, inputs], and a bias where the model has one."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter([outputs, inputs])
        self.bias = nn.Parameter([outputs]) if bias else None

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        y = op.MatMul(x, op.Transpose(self.weight, perm=[1, 0]))
        return y if self.bias is None else op.Add(y, self.bias)


class Norm(nn.Module):
    def __init__(self, width: int, spec: ModelSpec) -> None:
        super().__init__()
        self.eps, self.plus_one = f32(spec.norm_eps), spec.norm is NormKind.RMS_PLUS_ONE
        self.weight = nn.Parameter([width])

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        weight = op.Add(self.weight, 1.0) if self.plus_one else self.weight
        return op.RMSNormalization(x, weight, axis=-1, epsilon=self.eps)


class Embedding(nn.Module):
    def __init__(self, vocab: int, hidden: int, scale: float) -> None:
        super().__init__()
        self.scale = f32(scale)
        self.weight = nn.Parameter([vocab, hidden])

    def forward(self, op: OpBuilder, ids: ir.Value) -> ir.Value:
        x = op.Gather(self.weight, ids, axis=0)
        return x if self.scale == 1.0 else op.Mul(x, self.scale)


class RotaryTable(nn.Module):
    """cos and sin [batch, q_len, dim / 2] of the positions; one per rope of the model."""

    def __init__(self, rope: RopeSpec, name: str) -> None:
        super().__init__()
        self.attention_factor = rope.attention_factor
        data = ir.tensor(inverse_frequencies(rope))
        self.inv_freq = nn.Parameter([rope.dim // 2], data=data, name=name)

    def forward(self, op: OpBuilder, positions: ir.Value) -> tuple[ir.Value, ir.Value]:
        column = op.Unsqueeze(op.Cast(positions, to=ir.DataType.FLOAT), [-1])
        angle = op.Mul(column, self.inv_freq)
        cos, sin = op.Cos(angle), op.Sin(angle)
        if self.attention_factor == 1.0:
            return cos, sin
        return op.Mul(cos, self.attention_factor), op.Mul(sin, self.attention_factor)


def window_mask(op: OpBuilder, positions: ir.Value, past: ir.Value, window: int) -> ir.Value:
    """Keys a query sees by its window, bool [batch, 1, q_len, total]: q_pos - k_pos < window. Key j of the past lies at position j."""
    total = op.Add(op.Shape(past, start=2, end=3), op.Shape(positions, start=1, end=2))
    keys = op.Range(0, op.Squeeze(total, [0]), 1)
    return op.Less(op.Sub(op.Unsqueeze(positions, [1, 3]), keys), window)


def activate(op: OpBuilder, x: ir.Value, activation: Activation) -> ir.Value:
    """The activation in standard operators."""
    match activation:
        case Activation.SILU:
            return op.Mul(x, op.Sigmoid(x))
        case Activation.GELU_TANH:
            return op.Gelu(x, approximate="tanh")
        case Activation.GELU:
            return op.Gelu(x)


class HeadNorm(Norm):
    """RMS normalisation of each head of [batch, q_len, heads * head_dim]."""

    def __init__(self, heads: int, spec: ModelSpec) -> None:
        super().__init__(spec.head_dim, spec)
        self.heads, self.head_dim = heads, spec.head_dim

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
        self.q_norm = HeadNorm(spec.heads, spec) if spec.qk_norm else None
        self.k_norm = HeadNorm(spec.kv_heads, spec) if spec.qk_norm else None

    def _rotate(self, op: OpBuilder, x: ir.Value, at: Positions, heads: int) -> ir.Value:
        partial = {} if self.spec.rope.dim == self.spec.head_dim else {"rotary_embedding_dim": self.spec.rope.dim}
        return op.RotaryEmbedding(x, at.cos, at.sin, num_heads=heads, **partial)

    def forward(self, op: OpBuilder, x: ir.Value, at: Positions, past: Past) -> tuple[ir.Value, Past]:
        spec = self.spec
        q, k, v = self.q_proj(op, x), self.k_proj(op, x), self.v_proj(op, x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(op, q), self.k_norm(op, k)
        q, k = self._rotate(op, q, at, spec.heads), self._rotate(op, k, at, spec.kv_heads)
        capped = {"softcap": f32(spec.attn_softcap)} if spec.attn_softcap else {}
        y, k_all, v_all = op.Attention(
            q,
            k,
            v,
            at.mask,
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
        self.activation = spec.activation

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        gate, up = self.gate_proj(op, x), self.up_proj(op, x)
        return self.down_proj(op, op.Mul(activate(op, gate, self.activation), up))


class Weight(nn.Module):
    """One parameter named `<module>.weight`."""

    def __init__(self, shape: list[int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(shape)

    def forward(self, op: OpBuilder) -> ir.Value:
        del op  # the call itself gives the parameter its name
        return self.weight


class Experts(nn.Module):
    """The weights of all experts of a layer, one above the other: gate and up [experts, intermediate, hidden], down the other way."""

    def __init__(self, hidden: int, moe: MoESpec) -> None:
        super().__init__()
        self.gate_proj = Weight([moe.experts, moe.intermediate, hidden])
        self.up_proj = Weight([moe.experts, moe.intermediate, hidden])
        self.down_proj = Weight([moe.experts, hidden, moe.intermediate])

    def forward(self, op: OpBuilder) -> tuple[ir.Value, ir.Value, ir.Value]:
        return self.gate_proj(op), self.up_proj(op), self.down_proj(op)


class MoE(nn.Module):
    def __init__(self, spec: ModelSpec, moe: MoESpec) -> None:
        super().__init__()
        self.moe = moe
        self.gate = Weight([moe.experts, spec.hidden])
        self.experts = Experts(spec.hidden, moe)

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        router, (gate, up, down) = self.gate(op), self.experts(op)
        how = {"top_k": self.moe.top_k, "renormalise": int(self.moe.renormalise)}
        y = op.call(moe_function(), x, router, gate, up, down, **how)
        y.type, y.shape = x.type, x.shape  # nothing infers through a function
        return y


class Layer(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.input_layernorm = Norm(spec.hidden, spec)
        self.self_attn = SelfAttention(spec)
        self.post_attention_layernorm = Norm(spec.hidden, spec)
        self.mlp = GatedMLP(spec) if spec.moe is None else MoE(spec, spec.moe)

    def forward(self, op: OpBuilder, x: ir.Value, at: Positions, past: Past) -> tuple[ir.Value, Past]:
        y, present = self.self_attn(op, self.input_layernorm(op, x), at, past)
        x = op.Add(x, y)
        return op.Add(x, self.mlp(op, self.post_attention_layernorm(op, x))), present


class PostNormLayer(nn.Module):
    """A layer whose attention and MLP are normalised after as well as before."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.input_layernorm = Norm(spec.hidden, spec)
        self.self_attn = SelfAttention(spec)
        self.post_attention_layernorm = Norm(spec.hidden, spec)
        self.pre_feedforward_layernorm = Norm(spec.hidden, spec)
        self.mlp = GatedMLP(spec)
        self.post_feedforward_layernorm = Norm(spec.hidden, spec)

    def forward(self, op: OpBuilder, x: ir.Value, at: Positions, past: Past) -> tuple[ir.Value, Past]:
        y, present = self.self_attn(op, self.input_layernorm(op, x), at, past)
        x = op.Add(x, self.post_attention_layernorm(op, y))
        y = self.mlp(op, self.pre_feedforward_layernorm(op, x))
        return op.Add(x, self.post_feedforward_layernorm(op, y)), present


class Backbone(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.embed_tokens = Embedding(spec.vocab, spec.hidden, spec.embed_scale)
        self.spec = spec
        self.rotary_emb = RotaryTable(spec.rope, INV_FREQ)
        self.rotary_emb_local = None if spec.local_rope is None else RotaryTable(spec.local_rope, LOCAL_INV_FREQ)
        self.layers = nn.ModuleList([(PostNormLayer if spec.post_norms else Layer)(spec) for _ in range(spec.layers)])
        self.norm = Norm(spec.hidden, spec)

    def _positions(self, op: OpBuilder, positions: ir.Value, past: ir.Value) -> dict[bool, Positions]:
        """By whether a layer slides; only what some layer needs is built."""
        spec = self.spec
        rotary = {False: self.rotary_emb, True: self.rotary_emb if self.rotary_emb_local is None else self.rotary_emb_local}
        kinds = sorted({spec.slides(layer) for layer in range(spec.layers)})
        tables = {module: module(op, positions) for module in dict.fromkeys(rotary[slides] for slides in kinds)}
        masks = {slides: window_mask(op, positions, past, spec.sliding_window) if slides else None for slides in kinds}
        cos_sin = {slides: tables[rotary[slides]] for slides in kinds}
        return {slides: Positions(cos_sin[slides][0], cos_sin[slides][1], masks[slides]) for slides in kinds}

    def forward(self, op: OpBuilder, ids: ir.Value, positions: ir.Value, past: Sequence[Past]) -> tuple[ir.Value, list[Past]]:
        x = self.embed_tokens(op, ids)
        at = self._positions(op, positions, past[0].k)
        present: list[Past] = []
        for number, (layer, old) in enumerate(zip(self.layers, past, strict=True)):
            x, new = layer(op, x, at[self.spec.slides(number)], old)
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
            logits = self.lm_head(op, x)
        else:
            logits = op.MatMul(x, op.Transpose(self.model.embed_tokens.weight, perm=[1, 0]))
        return _capped(op, logits, f32(self.spec.logit_softcap)), present


def _capped(op: OpBuilder, logits: ir.Value, cap: float) -> ir.Value:
    return op.Mul(op.Tanh(op.Div(logits, cap)), cap) if cap else logits
