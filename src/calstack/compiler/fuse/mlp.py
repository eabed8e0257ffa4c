"""The gated MLP's first half: act(gate) * up."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from calstack.calbin.packing import LANES
from calstack.compiler.fuse.match import attr, fused, made_by, new_node, only_use
from calstack.compiler.fuse.rule import Rule
from calstack.specs import Activation

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["GATED"]


@dataclasses.dataclass(frozen=True, slots=True)
class _Match:
    gate: ir.Node
    up: ir.Node
    activation: Activation


def _activated(value: ir.Value | None) -> tuple[ir.Value, Activation] | None:
    """(gate, activation) when `value` is an activation of it."""
    if (product := made_by(value, "Mul")) is not None:
        for gate, other in (product.inputs, reversed(product.inputs)):
            sigmoid = made_by(other, "Sigmoid")
            if sigmoid is not None and sigmoid.inputs[0] is gate:
                return gate, Activation.SILU
    if (swish := made_by(value, "Swish")) is not None and attr(swish, "alpha", 1.0) == 1.0:
        return swish.inputs[0], Activation.SILU
    if (gelu := made_by(value, "Gelu")) is not None:
        tanh = attr(gelu, "approximate", "none") == "tanh"
        return gelu.inputs[0], Activation.GELU_TANH if tanh else Activation.GELU
    return None


def _check(node: ir.Node) -> _Match | str:
    for left, right in (node.inputs, reversed(node.inputs)):
        found = _activated(left)
        up = fused(right, "Linear")
        if found is None or up is None:
            continue
        gate = fused(found[0], "Linear")
        if gate is None or gate.inputs[0] is not up.inputs[0]:
            return "gate and up are not products of one input"
        if gate.inputs[1].shape != up.inputs[1].shape or gate.inputs[1].shape[0] % LANES:
            return f"gate and up need equal outputs in blocks of {LANES}, have {gate.inputs[1].shape} and {up.inputs[1].shape}"
        if len(gate.inputs) != len(up.inputs) or not only_use(up.outputs[0]):
            return "only one of gate and up has a bias, or up is read elsewhere"
        return _Match(gate, up, found[1])
    return "does not multiply an activated product by a product"


def _rewrite(node: ir.Node, m: _Match) -> None:
    x, weights = m.gate.inputs[0], [m.gate.inputs[1], m.up.inputs[1]]
    biases = [*m.gate.inputs[2:], *m.up.inputs[2:]]
    new_node(node, "Stack", [x, *weights, *biases], node.outputs, {"weights": 2, "activation": m.activation.value})


GATED = Rule("gated", "Mul", _check, _rewrite)
