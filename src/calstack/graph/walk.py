"""Questions that passes and frontends ask of a graph."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from calstack.graph.names import kv_number

__all__ = ["FLOATS", "kv_layers", "name_of", "read_values", "weights_of"]

FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
_WEIGHT_USERS = frozenset({"Transpose", "MatMul", "Gather", "RMSNormalization", "LayerNormalization", "Add", "MoE"})


def name_of(value: ir.Value | None) -> str:
    """The value's name, "" for an omitted input."""
    return "" if value is None else value.name or ""


def read_values(node: ir.Node) -> Iterator[ir.Value]:
    """The inputs that are given."""
    return (value for value in node.inputs if value is not None)


def weights_of(graph: ir.Graph) -> dict[str, ir.Value]:
    """Initializers that hold model weights (not frequencies, shapes or scalars), by name, in graph order."""
    return {name: value for name, value in graph.initializers.items() if _is_weight(value)}


def _is_weight(value: ir.Value) -> bool:
    if value.dtype not in FLOATS or value.shape is None or len(value.shape) == 0:
        return False
    return any(use.node.op_type in _WEIGHT_USERS for use in value.uses())


def kv_layers(graph: ir.Graph) -> tuple[int, ...]:
    """Layer numbers of the KV inputs, ascending; a graph that lost a layer has a gap."""
    numbers = {kv_number(name_of(value)) for value in graph.inputs}
    return tuple(sorted(number for number in numbers if number is not None))
