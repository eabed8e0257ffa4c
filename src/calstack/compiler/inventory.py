"""Every operator of the graphs, sorted into classes before any long work; one that cannot be compiled ends the compile here."""

from __future__ import annotations

import dataclasses
import enum
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from calstack.compiler.fuse.ops import DOMAIN
from calstack.compiler.fuse.rule import Miss
from calstack.errors import UnsupportedError

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["Class", "Row", "check_fused", "take_inventory"]


class Class(enum.StrEnum):
    """What the compiler does with an operator."""

    NATIVE = "native"  # has a call of its own
    COMPOSABLE = "composable"  # rewritten into operators that have one
    FUSE = "worth fusing"  # becomes part of a neighbour's call
    HOST = "host fallback"  # would run on the host between calls; programs of version 1 hold no such call
    UNSUPPORTED = "unsupported"


_CLASSES = {
    Class.NATIVE: ("Gather", "MatMul", "Attention", "calbin::MoE"),
    Class.COMPOSABLE: ("Swish", "Gelu", "Identity", "Constant"),
    Class.FUSE: (
        *("RMSNormalization", "RotaryEmbedding", "Transpose", "Reshape", "Unsqueeze", "Cast"),
        *("Cos", "Sin", "Sigmoid", "Tanh", "Add", "Mul", "Div"),
        *("Shape", "Range", "Squeeze", "Sub", "Less"),  # the mask of a sliding window
    ),
    Class.HOST: ("TopK", "ArgMax", "Softmax", "Where", "Concat", "Slice", "Split"),
}
_CLASS_OF = {op: kind for kind, ops in _CLASSES.items() for op in ops}


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One operator of the inventory."""

    op: str
    kind: Class
    count: int
    example: str  # name of the first node


def take_inventory(models: Iterable[ir.Model]) -> tuple[Row, ...]:
    """Rows sorted by class and operator.

    Raises:
        UnsupportedError: naming every operator that cannot be compiled.
    """
    nodes: dict[str, list[str]] = defaultdict(list)
    for model in models:
        for node in model.graph.all_nodes():
            nodes[f"{node.domain}::{node.op_type}" if node.domain else node.op_type].append(node.name or node.op_type)
    order = list(Class)
    rows = [Row(op, _CLASS_OF.get(op, Class.UNSUPPORTED), len(names), names[0]) for op, names in nodes.items()]
    rows.sort(key=lambda row: (order.index(row.kind), row.op))
    _refuse(rows)
    return tuple(rows)


def _refuse(rows: Sequence[Row]) -> None:
    bad = [row for row in rows if row.kind in {Class.UNSUPPORTED, Class.HOST}]
    if bad:
        listed = "; ".join(f"{row.op} x{row.count} ({row.kind}, first at {row.example})" for row in bad)
        raise UnsupportedError(f"the graph has operators that cannot be compiled: {listed}", where="inventory", remedy=_REMEDY)


_REMEDY = "keep to the operators of the canonical form, docs/reference/calbin.md"


def check_fused(graph: ir.Graph, misses: Sequence[Miss]) -> None:
    """After fusion only fused operators may stand.

    Raises:
        UnsupportedError: naming the first operators left over, with the reasons rules gave.
    """
    left = [node for node in graph if node.domain != DOMAIN or node.op_type == "Stack"]
    if not left:
        return
    names = {node.name or node.op_type for node in left}
    reasons = dict.fromkeys(f"{miss.node}: {miss.rule}: {miss.reason}" for miss in misses if miss.node in names)
    listed = ", ".join(f"{node.op_type} {node.name}" for node in left[:4])
    why = "; ".join(list(reasons)[:4]) or "no rule looks at them"
    raise UnsupportedError(
        f"{len(left)} operators fit no call: {listed}; {why}",
        where=graph.name or "graph",
        remedy="keep the canonical form of graph/model.py",
    )
