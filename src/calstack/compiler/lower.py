"""Fused graph -> program calls, by walking it: what is not in the graph is not in the program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from calstack.calbin.program import (
    Attention,
    Call,
    Classify,
    Embed,
    EncoderAttention,
    LayerNorm,
    Linear,
    LmHead,
    MoeCombine,
    MoeExperts,
    MoeRoute,
    NormAdd,
    NormLinear,
    Pool,
    QkNormRopeKv,
    RopeTable,
    Vector,
    Weight,
)
from calstack.compiler.fuse.match import attr
from calstack.errors import UnsupportedError
from calstack.graph.names import INPUT_IDS, POSITIONS, TYPE_IDS
from calstack.specs import Activation, NormKind

if TYPE_CHECKING:
    import onnx_ir as ir

    from calstack.compiler.quantize.table import ParameterTable

_INDICES: Mapping[str, Literal["ids", "types", "positions"]] = MappingProxyType(
    {INPUT_IDS: "ids", TYPE_IDS: "types", POSITIONS: "positions"}
)

__all__ = ["KvShape", "Lowered", "lower"]


@dataclasses.dataclass(frozen=True, slots=True)
class KvShape:
    """What attention calls agree on."""

    heads: int
    head_dim: int


@dataclasses.dataclass(frozen=True, slots=True)
class Lowered:
    """Calls in order over named buffers; `widths` in f32 elements per row."""

    calls: tuple[Call, ...]
    widths: dict[str, int]
    kv_inputs: tuple[str, ...]  # graph input names of each KV layer's past K, in call order
    kv: KvShape


def lower(graph: ir.Graph, table: ParameterTable) -> Lowered:
    """Walk a fused graph in order.

    Raises:
        UnsupportedError: when a value is read after a call has changed it in place, or attention calls disagree on the KV cache.
    """
    walker = _Walker(graph, table)
    for position, node in enumerate(walker.nodes):
        walker.visit(position, node)
    return walker.result()


class _Walker:
    def __init__(self, graph: ir.Graph, table: ParameterTable) -> None:
        self.nodes = list(graph)
        self._where = graph.name or "graph"
        self._place = {id(node): index for index, node in enumerate(self.nodes)}
        self._table = table
        self._buffers: dict[int, str] = {}  # by id of the value
        self._widths: dict[str, int] = {}
        self._calls: list[Call] = []
        self._kv_inputs: list[str] = []
        self._kv: KvShape | None = None
        self._layer = -1
        self._lower: dict[str, Callable[[ir.Node], Call]] = {
            "Embed": self._embed,
            "RopeTable": self._rope_table,
            "NormLinear": self._norm_linear,
            "QkNormRopeKv": self._qk_norm_rope_kv,
            "Attention": self._attention,
            "Residual": self._residual,
            "Linear": self._linear,
            "LmHead": self._lm_head,
            "NormAdd": self._norm_add,
            "EmbedAdd": self._embed_add,
            "LayerNorm": self._layer_norm,
            "StackLinear": self._stack_linear,
            "LinearAct": self._linear,
            "EncoderAttention": self._encoder_attention,
            "Pool": self._pool,
            "Classify": self._classify,
        }

    def visit(self, position: int, node: ir.Node) -> None:
        """Append the node's call."""
        if node.op_type in {"Residual", "QkNormRopeKv", "MoeResidual", "NormAdd", "EmbedAdd"}:
            self._check_in_place(position, node)
        if node.op_type == "MoeResidual":
            self._calls += self._moe(node)
        else:
            self._calls.append(self._lower[node.op_type](node))

    def result(self) -> Lowered:
        """What was collected."""
        if self._kv is None or not any(isinstance(call, LmHead | Pool | Classify) for call in self._calls):
            raise UnsupportedError(
                "has no attention, or gives neither logits, an embedding nor scores",
                where=self._where,
                remedy="give a decoder, a sentence-transformers directory (its modules.json says how to pool) or a classifier",
            )
        return Lowered(tuple(self._calls), self._widths, tuple(self._kv_inputs), self._kv)

    def _check_in_place(self, position: int, node: ir.Node) -> None:
        value = node.inputs[0]
        for use in value.uses():
            if self._place[id(use.node)] > position:
                what = f"{value.name} is read by {use.node.name} after {node.name} has changed it in place"
                raise UnsupportedError(what, where=self._where, remedy="keep the residual stream of graph/model.py")

    def _new(self, kind: str, value: ir.Value, width: int) -> str:
        """A buffer of its own for `value`."""
        name = self._buffers[id(value)] = self._name(kind, width)
        return name

    def _name(self, kind: str, width: int) -> str:
        """A new buffer; those of layers are numbered."""
        name = kind if self._layer < 0 else f"{kind}.{self._layer}"
        while name in self._widths:
            name += "'"
        self._widths[name] = width
        return name

    def _of(self, value: ir.Value) -> str:
        return self._buffers[id(value)]

    def _same(self, value: ir.Value, old: ir.Value) -> str:
        self._buffers[id(value)] = self._of(old)
        return self._of(old)

    def _embed(self, node: ir.Node) -> Call:
        index, weight = self._looked_up(*node.inputs)
        return Embed(weight=weight, scale=attr(node, "scale", 1.0), index=index, out=self._new("x", node.outputs[0], weight.k))

    def _embed_add(self, node: ir.Node) -> Call:
        into, *what = node.inputs
        index, weight = self._looked_up(*what)
        return Embed(weight=weight, scale=attr(node, "scale", 1.0), index=index, add=True, out=self._same(node.outputs[0], into))

    def _looked_up(self, index: ir.Value, initializer: ir.Value) -> tuple[Literal["ids", "types", "positions"], Weight]:
        """What an embedding looks up in which weight. Tables of positions and segments are small: they stay in floats."""
        name = _INDICES.get(str(index.name))
        if name is None:
            raise UnsupportedError(f"looks up {index.name}", where=str(initializer.name), remedy=f"supported: {', '.join(_INDICES)}")
        small = name != "ids"
        return name, self._table.weight([initializer], head=not small, router=small)

    def _rope_table(self, node: ir.Node) -> Call:
        inv_freq = self._table.vector([node.inputs[1]])
        out = self._new("rope", node.outputs[0], 2 * inv_freq.n)
        return RopeTable(inv_freq=inv_freq, attention_factor=attr(node, "attention_factor", 1.0), out=out)

    def _norm_linear(self, node: ir.Node) -> Call:
        x, norm, *rest = node.inputs
        count, activation = attr(node, "weights", 1), attr(node, "activation", "")
        if count == 3:
            self._layer += 1
        weights, biases = rest[:count], rest[count:]
        gated = Activation(activation) if activation else None
        weight = self._table.weight(weights, interleave=gated is not None)
        width = weight.n // 2 if gated else weight.n
        return NormLinear(
            layer=self._layer,
            x=self._of(x),
            norm=self._table.vector([norm], plus_one=bool(attr(node, "plus_one", 0))),
            norm_kind=_norm_kind(node),
            eps=attr(node, "eps", 0.0),
            weight=weight,
            bias=self._table.vector(biases, interleave=gated is not None) if biases else None,
            gated=gated,
            out=self._new("mlp" if gated else "qkv", node.outputs[0], width),
        )

    def _qk_norm_rope_kv(self, node: ir.Node) -> Call:
        qkv, cos, _, *norms = node.inputs
        plus_one = bool(attr(node, "plus_one", 0))
        q_norm, k_norm = (self._table.vector([n], plus_one=plus_one) for n in norms) if norms else (None, None)
        self._same(node.outputs[0], qkv)
        return QkNormRopeKv(
            layer=self._layer,
            qkv=self._of(qkv),
            table=self._of(cos),
            kv_layer=len(self._kv_inputs),
            heads=attr(node, "heads", 0),
            kv_heads=attr(node, "kv_heads", 0),
            head_dim=attr(node, "head_dim", 0),
            rope_dim=attr(node, "rope_dim", 0),
            q_norm=q_norm,
            k_norm=k_norm,
            norm_kind=_norm_kind(node),
            eps=attr(node, "eps", 0.0),
        )

    def _attention(self, node: ir.Node) -> Call:
        heads, kv_heads, head_dim = (int(attr(node, name, 0)) for name in ("heads", "kv_heads", "head_dim"))
        shape = KvShape(kv_heads, head_dim)
        if self._kv not in {None, shape}:
            raise UnsupportedError(f"KV heads change from {self._kv} to {shape}", where=str(node.name), remedy="not in this version")
        self._kv = shape
        self._kv_inputs.append(str(node.inputs[1].name))
        return Attention(
            layer=self._layer,
            qkv=self._of(node.inputs[0]),
            kv_layer=len(self._kv_inputs) - 1,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            scale=attr(node, "scale", 0.0),
            window=attr(node, "window", 0),
            softcap=attr(node, "softcap", 0.0),
            out=self._new("attn", node.outputs[0], heads * head_dim),
        )

    def _residual(self, node: ir.Node) -> Call:
        residual, x, weight, *bias = node.inputs
        self._same(node.outputs[0], residual)
        return Linear(
            layer=self._layer, x=self._of(x), weight=self._table.weight([weight]), bias=self._bias(bias), residual=self._of(residual)
        )

    def _norm_add(self, node: ir.Node) -> Call:
        residual, x, norm = node.inputs
        self._same(node.outputs[0], residual)
        return NormAdd(
            layer=self._layer,
            x=self._of(x),
            norm=self._table.vector([norm], plus_one=bool(attr(node, "plus_one", 0))),
            norm_kind=_norm_kind(node),
            eps=attr(node, "eps", 0.0),
            residual=self._of(residual),
        )

    def _moe(self, node: ir.Node) -> list[Call]:
        residual, x, norm, router, gate, up, down = node.inputs
        top_k, eps, kind = attr(node, "top_k", 0), attr(node, "eps", 0.0), _norm_kind(node)
        weights = self._table.vector([norm], plus_one=bool(attr(node, "plus_one", 0)))
        route = MoeRoute(
            layer=self._layer,
            x=self._of(x),
            norm=weights,
            norm_kind=kind,
            eps=eps,
            weight=self._table.weight([router], router=True),
            top_k=top_k,
            renormalise=bool(attr(node, "renormalise", 0)),
            out=self._name("choice", 3 * top_k),
        )
        down_weight = self._table.weight([down])
        experts = MoeExperts(
            layer=self._layer,
            x=route.x,
            norm=weights,
            norm_kind=kind,
            eps=eps,
            weight=self._table.weight([gate, up], interleave=True),
            down=down_weight,
            choice=route.out,
            top_k=top_k,
            experts=route.weight.n,
            all_experts=route.weight.n,
            out=self._name("experts", top_k * route.weight.k),
        )
        self._same(node.outputs[0], residual)
        return [route, experts, MoeCombine(layer=self._layer, x=experts.out, choice=route.out, residual=self._of(residual), top_k=top_k)]

    def _linear(self, node: ir.Node) -> Call:
        x, initializer, *bias = node.inputs
        weight = self._table.weight([initializer])
        activation = attr(node, "activation", "")
        out = self._new("mlp" if activation else "linear", node.outputs[0], weight.n)
        act = Activation(activation) if activation else None
        return Linear(layer=self._layer, x=self._of(x), weight=weight, bias=self._bias(bias), activation=act, out=out)

    def _stack_linear(self, node: ir.Node) -> Call:
        self._layer += 1
        x, *rest = node.inputs
        count = attr(node, "weights", 3)
        weight = self._table.weight(rest[:count])
        out = self._new("qkv", node.outputs[0], weight.n)
        return Linear(layer=self._layer, x=self._of(x), weight=weight, bias=self._bias(rest[count:]), out=out)

    def _layer_norm(self, node: ir.Node) -> Call:
        x, norm, bias = node.inputs
        alone = len(x.uses()) == 1
        out = self._same(node.outputs[0], x) if alone else self._new("x", node.outputs[0], self._widths[self._of(x)])
        vectors = self._table.vector([norm]), self._table.vector([bias])
        return LayerNorm(layer=self._layer, x=self._of(x), norm=vectors[0], bias=vectors[1], eps=attr(node, "eps", 0.0), out=out)

    def _encoder_attention(self, node: ir.Node) -> Call:
        heads, kv_heads, head_dim = (int(attr(node, name, 0)) for name in ("heads", "kv_heads", "head_dim"))
        self._kv = KvShape(kv_heads, head_dim)
        return EncoderAttention(
            layer=self._layer,
            qkv=self._of(node.inputs[0]),
            kv=self._name("kv", 2 * kv_heads * head_dim),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            scale=attr(node, "scale", 0.0),
            out=self._new("attn", node.outputs[0], heads * head_dim),
        )

    def _pool(self, node: ir.Node) -> Call:
        return Pool(x=self._of(node.inputs[0]), how=attr(node, "how", "mean"), normalise=bool(attr(node, "normalise", 0)))

    def _classify(self, node: ir.Node) -> Call:
        x, weight, *rest = node.inputs
        bias, (head, *head_bias) = rest[: attr(node, "bias", 0)], rest[attr(node, "bias", 0) :]
        weights = self._table.weight([weight]), self._table.weight([head], router=True)
        return Classify(x=self._of(x), weight=weights[0], bias=self._bias(bias), head=weights[1], head_bias=self._bias(head_bias))

    def _lm_head(self, node: ir.Node) -> Call:
        x, norm, weight, *bias = node.inputs
        return LmHead(
            x=self._of(x),
            norm=self._table.vector([norm], plus_one=bool(attr(node, "plus_one", 0))),
            norm_kind=_norm_kind(node),
            eps=attr(node, "eps", 0.0),
            weight=self._table.weight([weight], head=True),
            bias=self._bias(bias),
            softcap=attr(node, "softcap", 0.0),
        )

    def _bias(self, bias: Sequence[ir.Value]) -> Vector | None:
        return self._table.vector(bias) if bias else None


def _norm_kind(node: ir.Node) -> NormKind:
    return NormKind.RMS_PLUS_ONE if attr(node, "plus_one", 0) else NormKind.RMS
