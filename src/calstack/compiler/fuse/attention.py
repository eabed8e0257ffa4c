"""From the three projections through q/k norm and rope to attention over the KV cache."""

from __future__ import annotations

import dataclasses
from typing import Any

import onnx_ir as ir

from calstack.compiler.fuse.mask import window_of
from calstack.compiler.fuse.match import attr, fused, made_by, new_node, norm_of, only_use, through_views
from calstack.compiler.fuse.ops import DOMAIN
from calstack.compiler.fuse.rule import Rule

__all__ = ["ATTENTION"]


@dataclasses.dataclass(frozen=True, slots=True)
class _Head:
    """How q or k comes about: product, optional per-head norm, rope."""

    linear: ir.Node
    cos: ir.Value
    sin: ir.Value
    rope_dim: int  # 0 = all of the head
    norm: tuple[ir.Value, float, bool] | None


@dataclasses.dataclass(frozen=True, slots=True)
class _Match:
    linears: tuple[ir.Node, ir.Node, ir.Node]
    q: _Head
    k: _Head
    heads: int
    kv_heads: int
    head_dim: int
    window: int  # 0 = none


def _check_head(value: ir.Value, heads: int, which: str) -> _Head | str:
    rope = made_by(through_views(value), "RotaryEmbedding")
    if rope is None:
        return f"{which} is not rotated"
    if attr(rope, "interleaved", 0) or len(rope.inputs) > 3:
        return f"{which} is rotated in interleaved pairs or by gathered positions"
    if attr(rope, "num_heads", heads) not in {0, heads}:
        return f"{which} is rotated as {attr(rope, 'num_heads', 0)} heads, attended as {heads}"
    before = through_views(rope.inputs[0])
    norm = None
    if made_by(before, "RMSNormalization") is not None:
        found = norm_of(before)
        if isinstance(found, str):
            return found
        before, norm = through_views(found[0]), found[1:]
    linear = fused(before, "Linear")
    if linear is None:
        return f"{which} is not a product with a weight"
    return _Head(linear, rope.inputs[1], rope.inputs[2], int(attr(rope, "rotary_embedding_dim", 0)), norm)


def _check(node: ir.Node) -> _Match | str:
    inputs = [*node.inputs, None, None, None][:6]
    if not attr(node, "is_causal", 0):
        return "is not causal"
    window = window_of(inputs[3])
    if isinstance(window, str):
        return window
    if inputs[4] is None or inputs[5] is None or not (inputs[4].is_graph_input() and inputs[5].is_graph_input()):
        return "its past is no graph input"
    heads, kv_heads = int(attr(node, "q_num_heads", 0)), int(attr(node, "kv_num_heads", 0))
    if not heads or not kv_heads or heads % kv_heads:
        return f"{heads} query heads do not divide over {kv_heads} KV heads"
    q, k = _check_head(inputs[0], heads, "q"), _check_head(inputs[1], kv_heads, "k")
    if isinstance(q, str) or isinstance(k, str):
        return q if isinstance(q, str) else str(k)
    v = fused(through_views(inputs[2]), "Linear")
    if v is None:
        return "v is not a product with a weight"
    return _check_together(_Match((q.linear, k.linear, v), q, k, heads, kv_heads, q.linear.inputs[1].shape[0] // heads, window))


def _check_together(m: _Match) -> _Match | str:
    """What q, k and v must share."""
    if len({id(linear.inputs[0]) for linear in m.linears}) != 1:
        return "q, k and v are products of different inputs"
    rows = [linear.inputs[1].shape[0] for linear in m.linears]
    if rows != [m.heads * m.head_dim, m.kv_heads * m.head_dim, m.kv_heads * m.head_dim]:
        return f"q, k and v have {rows} outputs for {m.heads} and {m.kv_heads} heads"
    if len({len(linear.inputs) for linear in m.linears}) != 1:
        return "only some of q, k and v have a bias"
    if not all(only_use(linear.outputs[0]) for linear in m.linears):
        return "a projection is read elsewhere too"
    table = fused(m.q.cos, "RopeTable")
    if table is None or [m.q.cos, m.q.sin] != list(table.outputs) or [m.k.cos, m.k.sin] != list(table.outputs):
        return "q and k are not rotated by one table"
    if m.q.rope_dim != m.k.rope_dim or (m.q.norm is None) != (m.k.norm is None):
        return "q and k are treated differently"
    if m.q.norm and m.k.norm and (m.q.norm[1:] != m.k.norm[1:] or tuple(m.q.norm[0].shape) != (m.head_dim,)):
        return "q and k norms differ, or are not per head"
    return m


def _rewrite(node: ir.Node, m: _Match) -> None:
    x = m.linears[0].inputs[0]
    weights = [linear.inputs[1] for linear in m.linears]
    biases = [linear.inputs[2] for linear in m.linears if len(linear.inputs) == 3]
    shape = {"heads": m.heads, "kv_heads": m.kv_heads, "head_dim": m.head_dim}
    qkv = _insert(node, "Stack", [x, *weights, *biases], {"weights": 3}, f"{node.name}/qkv")
    norms = [m.q.norm[0], m.k.norm[0]] if m.q.norm and m.k.norm else []
    eps, plus_one = m.q.norm[1:] if m.q.norm else (0.0, False)
    rope = {"rope_dim": m.q.rope_dim or m.head_dim, "eps": eps, "plus_one": int(plus_one)}
    rotated = _insert(node, "QkNormRopeKv", [qkv, m.q.cos, m.q.sin, *norms], shape | rope, f"{node.name}/rotated")
    scale = float(attr(node, "scale", m.head_dim**-0.5))
    attention = shape | {"scale": scale, "softcap": float(attr(node, "softcap", 0.0)), "window": m.window}
    new_node(node, "Attention", [rotated, node.inputs[4], node.inputs[5]], node.outputs, attention)


def _insert(before: ir.Node, op: str, inputs: list[ir.Value], attributes: dict[str, Any], name: str) -> ir.Value:
    node = ir.node(op, inputs, attributes, domain=DOMAIN, outputs=[ir.Value(name=name)], name=name)
    before.graph.insert_before(before, node)
    return node.outputs[0]


ATTENTION = Rule("attention", "Attention", _check, _rewrite)
