"""The encoder as modules that trace to the canonical encode graph (`calstack/graph/model.py`); names are HF's for `bert`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnxscript import nn

from calstack.frontends.arch.decoder import Linear, activate, f32

if TYPE_CHECKING:
    import onnx_ir as ir
    from onnxscript._internal.builder import OpBuilder

    from calstack.specs import EncoderSpec, ModelSpec

__all__ = ["Encoder"]


class LayerNorm(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.eps = f32(spec.norm_eps)
        self.weight = nn.Parameter([spec.hidden])
        self.bias = nn.Parameter([spec.hidden])

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        return op.LayerNormalization(x, self.weight, self.bias, axis=-1, epsilon=self.eps)


class Table(nn.Module):
    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter([rows, width])

    def forward(self, op: OpBuilder, index: ir.Value) -> ir.Value:
        return op.Gather(self.weight, index, axis=0)


class Embeddings(nn.Module):
    def __init__(self, spec: ModelSpec, encoder: EncoderSpec) -> None:
        super().__init__()
        self.word_embeddings = Table(spec.vocab, spec.hidden)
        self.position_embeddings = Table(encoder.positions, spec.hidden)
        self.token_type_embeddings = Table(encoder.types, spec.hidden)
        self.LayerNorm = LayerNorm(spec)

    def forward(self, op: OpBuilder, ids: ir.Value, positions: ir.Value, types: ir.Value) -> ir.Value:
        x = op.Add(self.word_embeddings(op, ids), self.token_type_embeddings(op, types))
        return self.LayerNorm(op, op.Add(x, self.position_embeddings(op, positions)))


class SelfAttention(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.heads, self.scale = spec.heads, f32(spec.scale)
        width = spec.heads * spec.head_dim
        self.query, self.key, self.value = (Linear(spec.hidden, width, bias=spec.qkv_bias) for _ in range(3))

    def forward(self, op: OpBuilder, x: ir.Value, mask: ir.Value) -> ir.Value:
        q, k, v = self.query(op, x), self.key(op, x), self.value(op, x)
        return op.Attention(q, k, v, mask, is_causal=0, scale=self.scale, q_num_heads=self.heads, kv_num_heads=self.heads)


class Output(nn.Module):
    """A product added to the stream, then its norm."""

    def __init__(self, width: int, spec: ModelSpec, *, bias: bool) -> None:
        super().__init__()
        self.dense = Linear(width, spec.hidden, bias=bias)
        self.LayerNorm = LayerNorm(spec)

    def forward(self, op: OpBuilder, y: ir.Value, x: ir.Value) -> ir.Value:
        return self.LayerNorm(op, op.Add(x, self.dense(op, y)))


class Attention(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.self = SelfAttention(spec)
        self.output = Output(spec.heads * spec.head_dim, spec, bias=spec.o_bias)

    def forward(self, op: OpBuilder, x: ir.Value, mask: ir.Value) -> ir.Value:
        return self.output(op, self.self(op, x, mask), x)


class Intermediate(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.activation = spec.activation
        self.dense = Linear(spec.hidden, spec.intermediate, bias=spec.mlp_bias)

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        return activate(op, self.dense(op, x), self.activation)


class Layer(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.attention = Attention(spec)
        self.intermediate = Intermediate(spec)
        self.output = Output(spec.intermediate, spec, bias=spec.mlp_bias)

    def forward(self, op: OpBuilder, x: ir.Value, mask: ir.Value) -> ir.Value:
        x = self.attention(op, x, mask)
        return self.output(op, self.intermediate(op, x), x)


class Stack(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.layer = nn.ModuleList([Layer(spec) for _ in range(spec.layers)])

    def forward(self, op: OpBuilder, x: ir.Value, mask: ir.Value) -> ir.Value:
        for layer in self.layer:
            x = layer(op, x, mask)
        return x


class Pooler(nn.Module):
    """tanh of a product with the first token's state."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.dense = Linear(spec.hidden, spec.hidden, bias=True)

    def forward(self, op: OpBuilder, first: ir.Value) -> ir.Value:
        return op.Tanh(self.dense(op, first))


class Encoder(nn.Module):
    """ids, positions, types [batch, q_len], lengths [batch] -> states [batch, q_len, hidden], and what the heads make of them."""

    def __init__(self, spec: ModelSpec, encoder: EncoderSpec) -> None:
        super().__init__()
        self.heads = encoder
        self.embeddings = Embeddings(spec, encoder)
        self.encoder = Stack(spec)
        self.pooler = Pooler(spec) if encoder.labels else None
        self.classifier = Linear(spec.hidden, len(encoder.labels), bias=True) if encoder.labels else None

    def forward(
        self, op: OpBuilder, ids: ir.Value, positions: ir.Value, types: ir.Value, lengths: ir.Value
    ) -> tuple[ir.Value, ir.Value | None, ir.Value | None]:
        width = op.Shape(ids, start=1, end=2)
        rows = op.Range(0, op.Squeeze(width, [0]), 1)
        used = op.Less(rows, op.Unsqueeze(lengths, [1]))  # [batch, q_len]
        column = op.Shape(op.Unsqueeze(ids, [2]), start=1, end=3)  # [q_len, 1]
        mask = op.Expand(op.Unsqueeze(used, [1, 2]), column)  # [batch, 1, q_len, q_len], as onnxruntime wants it
        x = self.encoder(op, self.embeddings(op, ids, positions, types), mask)
        return x, self._embedding(op, x, used, lengths), self._scores(op, x)

    def _embedding(self, op: OpBuilder, x: ir.Value, used: ir.Value, lengths: ir.Value) -> ir.Value | None:
        if self.heads.pooling == "none":
            return None
        if self.heads.pooling == "cls":
            pooled = op.Gather(x, 0, axis=1)
        else:
            kept = op.Mul(x, op.Unsqueeze(op.Cast(used, to=1), [2]))
            pooled = op.Div(op.ReduceSum(kept, [1], keepdims=0), op.Unsqueeze(op.Cast(lengths, to=1), [1]))
        return op.LpNormalization(pooled, axis=-1, p=2) if self.heads.normalise else pooled

    def _scores(self, op: OpBuilder, x: ir.Value) -> ir.Value | None:
        if self.pooler is None or self.classifier is None:
            return None
        return self.classifier(op, self.pooler(op, op.Gather(x, 0, axis=1)))
