"""What only encoders have: layer norm, attention over a whole text, activated products, pooling and the classifier."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from calstack.compiler.fuse.mask import is_text_mask
from calstack.compiler.fuse.match import attr, constant, fused, initializer, made_by, new_node, only_use, scalar, through_views
from calstack.compiler.fuse.ops import DOMAIN
from calstack.compiler.fuse.rule import Rule
from calstack.graph.names import CUR_LEN, EMBEDDING, SCORES
from calstack.specs import Activation

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ACTIVATED", "CLASSIFY", "ENCODER_ATTENTION", "LAYER_NORM", "POOL_CLS", "POOL_MEAN", "POOL_NORMALISED"]


def _check_norm(node: ir.Node) -> list[ir.Value] | str:
    if attr(node, "axis", -1) != -1 or len(node.inputs) != 3:
        return "normalises another axis than the last, or has no bias"
    x, weight, bias = node.inputs
    if x is None or weight is None or bias is None or not initializer(weight) or not initializer(bias):
        return "its weight or bias is no initializer"
    return [x, weight, bias]


def _rewrite_norm(node: ir.Node, match: list[ir.Value]) -> None:
    new_node(node, "LayerNorm", match, [node.outputs[0]], {"eps": float(attr(node, "epsilon", 1e-5))})


def _check_activated(node: ir.Node) -> ir.Node | str:
    linear = fused(node.inputs[0], "Linear")
    if linear is None or not only_use(linear.outputs[0]):
        return "what it activates is no product, or is read elsewhere too"
    return linear


def _rewrite_activated(node: ir.Node, match: ir.Node) -> None:
    activation = Activation.GELU_TANH if attr(node, "approximate", "none") == "tanh" else Activation.GELU
    new_node(node, "LinearAct", match.inputs, node.outputs, {"activation": activation.value})


@dataclasses.dataclass(frozen=True, slots=True)
class _Heads:
    linears: tuple[ir.Node, ...]
    heads: int
    kv_heads: int
    head_dim: int


def _check_attention(node: ir.Node) -> _Heads | str:
    inputs = [*node.inputs, None, None, None][:6]
    if attr(node, "is_causal", 0) or inputs[4] is not None or attr(node, "softcap", 0.0):
        return "is causal, has a past or a soft cap"
    if not is_text_mask(inputs[3]):
        return "its mask is not the one of a text: Range(0, q_len, 1) < cur_seq_len"
    linears = [fused(through_views(value), "Linear") for value in inputs[:3]]
    found = tuple(linear for linear in linears if linear is not None)
    heads, kv_heads = int(attr(node, "q_num_heads", 0)), int(attr(node, "kv_num_heads", 0))
    if len(found) != 3 or not heads or not kv_heads or heads % kv_heads:
        return f"q, k and v are not all products, or {heads} query heads do not divide over {kv_heads} KV heads"
    return _check_together(_Heads(found, heads, kv_heads, found[0].inputs[1].shape[0] // heads))


def _check_together(m: _Heads) -> _Heads | str:
    if len({id(linear.inputs[0]) for linear in m.linears}) != 1 or len({len(linear.inputs) for linear in m.linears}) != 1:
        return "q, k and v are products of different inputs, or only some have a bias"
    rows = [linear.inputs[1].shape[0] for linear in m.linears]
    if rows != [m.heads * m.head_dim, m.kv_heads * m.head_dim, m.kv_heads * m.head_dim]:
        return f"q, k and v have {rows} outputs for {m.heads} and {m.kv_heads} heads"
    return m if all(only_use(linear.outputs[0]) for linear in m.linears) else "a projection is read elsewhere too"


def _rewrite_attention(node: ir.Node, m: _Heads) -> None:
    inputs = [m.linears[0].inputs[0], *(linear.inputs[1] for linear in m.linears)]
    inputs += [linear.inputs[2] for linear in m.linears if len(linear.inputs) == 3]
    name = f"{node.name}/qkv"
    stack = ir.node("StackLinear", inputs, {"weights": 3}, domain=DOMAIN, outputs=[ir.Value(name=name)], name=name)
    node.graph.insert_before(node, stack)
    shape = {"heads": m.heads, "kv_heads": m.kv_heads, "head_dim": m.head_dim, "scale": float(attr(node, "scale", m.head_dim**-0.5))}
    new_node(node, "EncoderAttention", [stack.outputs[0]], [node.outputs[0]], shape)


def _first_row(value: ir.Value | None) -> ir.Value | None:
    """X when `value` is its row of position 0."""
    gather = made_by(value, "Gather")
    if gather is None or attr(gather, "axis", 0) != 1 or initializer(gather.inputs[0]) or scalar(gather.inputs[1]) != 0:
        return None
    return gather.inputs[0]


def _mean(value: ir.Value | None) -> ir.Value | None:
    """X when `value` is the mean of a text's rows of it."""
    div = made_by(value, "Div")
    total = made_by(div.inputs[0], "ReduceSum") if div is not None else None
    kept = made_by(total.inputs[0], "Mul") if total is not None else None
    if div is None or total is None or kept is None or attr(total, "keepdims", 1):
        return None
    axes = constant(total.inputs[1])
    if axes is None or list(np.asarray(axes).reshape(-1)) != [1] or not _leads_to(div.inputs[1], CUR_LEN):
        return None
    for x, used in (kept.inputs, reversed(kept.inputs)):
        if made_by(_unviewed(used), "Less") is not None and x is not None:
            return x
    return None


def _unviewed(value: ir.Value | None) -> ir.Value | None:
    while value is not None and (node := value.producer()) is not None and node.op_type in {"Unsqueeze", "Cast"}:
        value = node.inputs[0]
    return value


def _leads_to(value: ir.Value | None, name: str) -> bool:
    found = _unviewed(value)
    return found is not None and found.is_graph_input() and found.name == name


@dataclasses.dataclass(frozen=True, slots=True)
class _Pooled:
    x: ir.Value
    how: str


def _pooled(value: ir.Value | None) -> _Pooled | str:
    if (x := _mean(value)) is not None:
        return _Pooled(x, "mean")
    if (x := _first_row(value)) is not None:
        return _Pooled(x, "cls")
    return "is neither the mean of a text's rows nor its first row"


def _check_pooled(node: ir.Node) -> _Pooled | str:
    value = node.outputs[0]
    return _pooled(value) if value.is_graph_output() and value.name == EMBEDDING else "its result is not the embedding"


def _check_normalised(node: ir.Node) -> _Pooled | str:
    if attr(node, "p", 2) != 2 or attr(node, "axis", -1) != -1 or node.outputs[0].name != EMBEDDING:
        return "is no Euclidean length over the last axis, or its result is not the embedding"
    return _pooled(node.inputs[0])


def _rewrite_pooled(node: ir.Node, match: _Pooled) -> None:
    new_node(node, "Pool", [match.x], node.outputs, {"how": match.how, "normalise": int(node.op_type == "LpNormalization")})


@dataclasses.dataclass(frozen=True, slots=True)
class _Classifier:
    x: ir.Value
    first: Sequence[ir.Value | None]  # weight and bias
    second: Sequence[ir.Value | None]


def _check_classifier(node: ir.Node) -> _Classifier | str:
    value = node.outputs[0]
    if not value.is_graph_output() or value.name != SCORES:
        return "its result is not the scores"
    tanh = made_by(node.inputs[0], "Tanh")
    pooler = fused(tanh.inputs[0], "Linear") if tanh is not None else None
    x = _first_row(pooler.inputs[0]) if pooler is not None else None
    if pooler is None or x is None:
        return "it is no product with the tanh of a product with the first row"
    return _Classifier(x, pooler.inputs[1:], node.inputs[1:])


def _rewrite_classifier(node: ir.Node, m: _Classifier) -> None:
    attributes = {"bias": len(m.first) - 1, "head_bias": len(m.second) - 1}
    new_node(node, "Classify", [m.x, *m.first, *m.second], node.outputs, attributes)


LAYER_NORM = Rule("layer_norm", "LayerNormalization", _check_norm, _rewrite_norm)
ACTIVATED = Rule("activated", "Gelu", _check_activated, _rewrite_activated)
ENCODER_ATTENTION = Rule("encoder_attention", "Attention", _check_attention, _rewrite_attention)
POOL_NORMALISED = Rule("pool_normalised", "LpNormalization", _check_normalised, _rewrite_pooled)
POOL_MEAN = Rule("pool_mean", "Div", _check_pooled, _rewrite_pooled)
POOL_CLS = Rule("pool_cls", "Gather", _check_pooled, _rewrite_pooled)
CLASSIFY = Rule("classify", "Linear", _check_classifier, _rewrite_classifier, DOMAIN)
