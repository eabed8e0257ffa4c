"""Small questions about a graph that fusion rules ask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from calstack.compiler.fuse.ops import DOMAIN

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["attr", "constant", "fused", "initializer", "is_op", "made_by", "new_node", "norm_of", "only_use", "scalar", "through_views"]

_VIEWS = frozenset({"Reshape", "Identity"})


def is_op(node: ir.Node | None, op: str, domain: str = "") -> bool:
    """Whether `node` is this operator."""
    return node is not None and node.op_type == op and node.domain == domain


def made_by(value: ir.Value | None, op: str, domain: str = "") -> ir.Node | None:
    """The node that makes `value`, if it is this operator."""
    node = None if value is None else value.producer()
    return node if is_op(node, op, domain) else None


def fused(value: ir.Value | None, op: str) -> ir.Node | None:
    """The fused node that makes `value`, if it is this operator."""
    return made_by(value, op, DOMAIN)


def through_views(value: ir.Value | None) -> ir.Value | None:
    """Backwards past Reshape and Identity: the element order is the same, only the shape's reading differs."""
    while value is not None and (node := value.producer()) is not None and node.op_type in _VIEWS and node.domain == "":
        value = node.inputs[0]
    return value


def attr(node: ir.Node, name: str, default: Any) -> Any:
    """An attribute's plain value."""
    found = node.attributes.get(name)
    return default if found is None else found.value


def constant(value: ir.Value | None) -> npt.NDArray[np.generic] | None:
    """The array of an initializer or Constant node."""
    if value is None:
        return None
    if value.const_value is not None:
        return np.asarray(value.const_value.numpy())
    node = made_by(value, "Constant")
    if node is None or not node.attributes:
        return None
    found = next(iter(node.attributes.values())).value
    return np.asarray(found.numpy() if hasattr(found, "numpy") else found)


def scalar(value: ir.Value | None) -> float | None:
    """The value of a one-element constant."""
    if value is None or (value.shape is not None and value.const_value is not None and value.const_value.size != 1):
        return None  # asked before reading: a weight is not loaded to learn that it is no scalar
    array = constant(value)
    return float(array.reshape(-1)[0]) if array is not None and array.size == 1 else None


def initializer(value: ir.Value | None) -> bool:
    """Whether `value` is a weight."""
    return value is not None and value.is_initializer()


def only_use(value: ir.Value) -> bool:
    """Whether exactly one node reads `value` and it is no graph output."""
    return len(value.uses()) == 1 and not value.is_graph_output()


def norm_of(value: ir.Value | None) -> tuple[ir.Value, ir.Value, float, bool] | str:
    """(x, weight, eps, plus_one) of the RMS normalisation that makes `value`, or why there is none."""
    node = made_by(value, "RMSNormalization")
    if node is None:
        return f"{value.name if value is not None else 'input'} is not made by RMSNormalization"
    if attr(node, "axis", -1) != -1:
        return f"{node.name} normalises another axis than the last"
    weight, plus_one = node.inputs[1], False
    add = made_by(weight, "Add")
    if add is not None:
        pairs = [(add.inputs[0], add.inputs[1]), (add.inputs[1], add.inputs[0])]
        weight = next((w for w, one in pairs if initializer(w) and scalar(one) == 1.0), None)
        plus_one = True
    if not initializer(weight):
        return f"the weight of {node.name} is no initializer"
    return node.inputs[0], weight, float(attr(node, "epsilon", 1e-5)), plus_one


def new_node(
    before: ir.Node, op: str, inputs: Sequence[ir.Value | None], replaced: Sequence[ir.Value], attributes: dict[str, Any] | None = None
) -> ir.Node:
    """Insert a fused node before `before` and let it make what `replaced` was."""
    outputs = [ir.Value(name=f"{value.name}", shape=value.shape, type=value.type) for value in replaced]
    node = ir.node(op, inputs, attributes or {}, domain=DOMAIN, outputs=outputs, name=f"{op}/{replaced[0].name}")
    before.graph.insert_before(before, node)
    ir.convenience.replace_all_uses_with(list(replaced), outputs, replace_graph_outputs=True)
    return node
