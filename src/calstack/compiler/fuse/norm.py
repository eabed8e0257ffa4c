"""A normalisation taken into the products that read it, and into the head."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from calstack.compiler.fuse.match import attr, fused, initializer, is_op, new_node, norm_of, only_use, scalar
from calstack.compiler.fuse.ops import DOMAIN
from calstack.compiler.fuse.rule import Rule

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["LM_HEAD", "NORM_RESIDUAL", "NORM_STACK"]

Norm = tuple["ir.Value", "ir.Value", float, bool]


def _check_stack(node: ir.Node) -> Norm | str:
    return norm_of(node.inputs[0])


def _rewrite_stack(node: ir.Node, match: Norm) -> None:
    x, norm, eps, plus_one = match
    attributes = {"weights": attr(node, "weights", 1), "activation": attr(node, "activation", ""), "eps": eps, "plus_one": int(plus_one)}
    new_node(node, "NormLinear", [x, norm, *node.inputs[1:]], node.outputs, attributes)


@dataclasses.dataclass(frozen=True, slots=True)
class _Head:
    norm: Norm
    logits: ir.Value
    softcap: float


def _check_head(node: ir.Node) -> _Head | str:
    logits, softcap = _capped(node.outputs[0])
    if not logits.is_graph_output():
        return "its result is no graph output"
    norm = norm_of(node.inputs[0])
    return norm if isinstance(norm, str) else _Head(norm, logits, softcap)


def _capped(value: ir.Value) -> tuple[ir.Value, float]:
    """`value`, or cap * tanh(value / cap) when that is its only reader."""
    div = _user(value, "Div")
    tanh = _user(div.outputs[0], "Tanh") if div is not None else None
    mul = _user(tanh.outputs[0], "Mul") if tanh is not None else None
    if div is None or tanh is None or mul is None:
        return value, 0.0
    cap = scalar(div.inputs[1])
    back = scalar(mul.inputs[1] if mul.inputs[0] is tanh.outputs[0] else mul.inputs[0])
    return (mul.outputs[0], cap) if cap is not None and cap == back else (value, 0.0)


def _user(value: ir.Value, op: str) -> ir.Node | None:
    if not only_use(value):
        return None
    node = value.uses()[0].node
    return node if is_op(node, op) else None


def _rewrite_head(node: ir.Node, match: _Head) -> None:
    x, norm, eps, plus_one = match.norm
    attributes = {"eps": eps, "plus_one": int(plus_one), "softcap": match.softcap}
    new_node(node, "LmHead", [x, norm, *node.inputs[1:]], [match.logits], attributes)


@dataclasses.dataclass(frozen=True, slots=True)
class _Behind:
    residual: ir.Value
    linear: ir.Node
    norm: Norm


def _check_behind(node: ir.Node) -> _Behind | str:
    for residual, value in (node.inputs, reversed(node.inputs)):
        norm = norm_of(value)
        if isinstance(norm, str) or residual is None or initializer(residual):
            continue
        linear = fused(norm[0], "Linear")
        if linear is None or not only_use(value) or not only_use(norm[0]):
            return "what is normalised is no product, or is read elsewhere too"
        return _Behind(residual, linear, norm)
    return "does not add a normalised product to a residual"


def _rewrite_behind(node: ir.Node, match: _Behind) -> None:
    x, weight, eps, plus_one = match.norm
    new_node(node, "NormAdd", [match.residual, x, weight], node.outputs, {"eps": eps, "plus_one": int(plus_one)})


NORM_RESIDUAL = Rule("norm_residual", "Add", _check_behind, _rewrite_behind)
NORM_STACK = Rule("norm_linear", "Stack", _check_stack, _rewrite_stack, DOMAIN)
LM_HEAD = Rule("lm_head", "Linear", _check_head, _rewrite_head, DOMAIN)
