"""MatMul with a transposed weight, its bias, and its place in the residual stream."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from calstack.compiler.fuse.match import attr, fused, initializer, made_by, new_node, only_use
from calstack.compiler.fuse.rule import Rule

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["BIAS", "LINEAR", "RESIDUAL"]


@dataclasses.dataclass(frozen=True, slots=True)
class _Product:
    x: ir.Value
    weight: ir.Value


def _check_linear(node: ir.Node) -> _Product | str:
    transpose = made_by(node.inputs[1], "Transpose")
    if transpose is None or list(attr(transpose, "perm", [1, 0])) != [1, 0]:
        return "the right operand is not Transpose(weight, perm=[1, 0])"
    weight = transpose.inputs[0]
    if not initializer(weight) or weight.shape is None or len(weight.shape) != 2:
        return "the transposed operand is no 2-D weight"
    return _Product(node.inputs[0], weight)


def _rewrite_linear(node: ir.Node, match: _Product) -> None:
    new_node(node, "Linear", [match.x, match.weight], node.outputs)


@dataclasses.dataclass(frozen=True, slots=True)
class _Biased:
    linear: ir.Node
    bias: ir.Value


def _check_bias(node: ir.Node) -> _Biased | str:
    for value, bias in (node.inputs, reversed(node.inputs)):
        linear = fused(value, "Linear")
        if linear is not None and initializer(bias) and len(linear.inputs) == 2:
            if not only_use(value):
                return "the product without its bias is read elsewhere"
            if tuple(bias.shape or ()) != (linear.inputs[1].shape[0],):
                return "the added weight is not one value per output"
            return _Biased(linear, bias)
    return "does not add a weight vector to a product"


def _rewrite_bias(node: ir.Node, match: _Biased) -> None:
    new_node(node, "Linear", [*match.linear.inputs, match.bias], node.outputs)


@dataclasses.dataclass(frozen=True, slots=True)
class _Stream:
    residual: ir.Value
    linear: ir.Node


def _check_residual(node: ir.Node) -> _Stream | str:
    for residual, value in (node.inputs, reversed(node.inputs)):
        linear = fused(value, "Linear")
        if linear is None or residual is None or initializer(residual):
            continue
        if not only_use(value):
            return "the product is read elsewhere too"
        return _Stream(residual, linear)
    return "does not add a product to a residual"


def _rewrite_residual(node: ir.Node, match: _Stream) -> None:
    new_node(node, "Residual", [match.residual, *match.linear.inputs], node.outputs)


LINEAR = Rule("linear", "MatMul", _check_linear, _rewrite_linear)
BIAS = Rule("bias", "Add", _check_bias, _rewrite_bias)
RESIDUAL = Rule("residual", "Add", _check_residual, _rewrite_residual)
