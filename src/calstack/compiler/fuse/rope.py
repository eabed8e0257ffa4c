"""cos and sin of the positions' angles, made once for all layers that share a rope."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from calstack.compiler.fuse.match import constant, made_by, new_node, only_use, scalar
from calstack.compiler.fuse.rule import Rule
from calstack.graph.names import POSITIONS

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["ROPE_TABLE"]

_COLUMN_VIEWS = ("Unsqueeze", "Cast", "Reshape", "Identity")


@dataclasses.dataclass(frozen=True, slots=True)
class _Table:
    positions: ir.Value
    inv_freq: ir.Value
    cos: ir.Value
    sin: ir.Value
    factor: float


def _positions(value: ir.Value | None) -> ir.Value | None:
    """The positions, when `value` is a float column of them."""
    while value is not None and not value.is_graph_input():
        node = value.producer()
        if node is None or node.op_type not in _COLUMN_VIEWS:
            return None
        value = node.inputs[0]
    return value if value is not None and value.name == POSITIONS else None


def _scaled(value: ir.Value) -> tuple[ir.Value, float]:
    """`value` times the constant its only reader multiplies it with, if there is one."""
    if only_use(value):
        user = value.uses()[0].node
        if user.op_type == "Mul":
            factor = scalar(user.inputs[1] if user.inputs[0] is value else user.inputs[0])
            if factor is not None:
                return user.outputs[0], factor
    return value, 1.0


def _check(node: ir.Node) -> _Table | str:
    angle = node.inputs[0]
    sines = [use.node for use in angle.uses() if use.node.op_type == "Sin"]
    product = made_by(angle, "Mul")
    if len(sines) != 1 or product is None:
        return "its angle is not a product shared with one Sin"
    for column, inv_freq in (product.inputs, reversed(product.inputs)):
        positions = _positions(column)
        if positions is None or constant(inv_freq) is None:
            continue
        cos, factor = _scaled(node.outputs[0])
        sin, other = _scaled(sines[0].outputs[0])
        if factor != other:
            return f"cos is scaled by {factor}, sin by {other}"
        return _Table(positions, inv_freq, cos, sin, factor)
    return "its angle is not positions times constant frequencies"


def _rewrite(node: ir.Node, match: _Table) -> None:
    new_node(node, "RopeTable", [match.positions, match.inv_freq], [match.cos, match.sin], {"attention_factor": match.factor})


ROPE_TABLE = Rule("rope_table", "Cos", _check, _rewrite)
