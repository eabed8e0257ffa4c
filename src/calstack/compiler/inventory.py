"""Every operator of the graphs, sorted into classes before any long work; one that cannot be compiled ends the compile here."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from calstack.compiler.fuse.ops import DOMAIN
from calstack.compiler.fuse.rule import Miss
from calstack.errors import UnsupportedError

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["Class", "OperatorRow", "Row", "check_fused", "list_operators", "take_inventory"]


class Class(enum.StrEnum):
    """What the compiler does with an operator."""

    NATIVE = "native"  # has a call of its own
    COMPOSABLE = "composable"  # rewritten into operators that have one
    FUSE = "worth fusing"  # becomes part of a neighbour's call
    HOST = "host fallback"  # would run on the host between calls; programs of version 1 hold no such call
    UNSUPPORTED = "unsupported"


_CLASSES = {
    Class.NATIVE: ("Gather", "MatMul", "Attention", "LayerNormalization", "calbin::MoE"),
    Class.COMPOSABLE: ("Swish", "Gelu", "Identity", "Constant"),
    Class.FUSE: (
        *("RMSNormalization", "RotaryEmbedding", "Transpose", "Reshape", "Unsqueeze", "Cast"),
        *("Cos", "Sin", "Sigmoid", "Tanh", "Add", "Mul", "Div"),
        *("Shape", "Range", "Squeeze", "Sub", "Less"),  # the mask of a sliding window
        *("Expand", "ReduceSum", "LpNormalization"),  # the mask of a text, pooling
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


class OperatorRow(msgspec.Struct, frozen=True, kw_only=True):
    """One operator as `calstack inventory` shows it; `share` is of the products of a token that sees 64 others."""

    op: str
    kind: str
    count: int
    dtypes: tuple[str, ...]
    shapes: str  # of outputs, smallest to largest where they are known
    axes: tuple[str, ...]  # dynamic ones
    tolerance: str
    share: float
    example: str  # name of the first node
    note: str


_NOTES = {
    Class.NATIVE: "has a call of its own",
    Class.COMPOSABLE: "rewritten into operators that have one",
    Class.FUSE: "becomes part of a neighbour's call",
    Class.HOST: "would run on the host between calls; programs of version 1 hold no such call: move it out of the graph",
    Class.UNSUPPORTED: "no call and no rewrite: express it by operators of the canonical form, or add a fusion rule (compiler/fuse)",
}
_TOLERANCES = {"Gather": "exact", "MatMul": "f32 1e-4 of the largest; int8 by the quality card", "Attention": "f32 1e-4 of the largest"}
_DEPTH = 64


def list_operators(models: Sequence[ir.Model]) -> list[OperatorRow]:
    """Rows of every operator of the graphs, sorted by class; nothing is refused."""
    nodes: dict[str, list[ir.Node]] = defaultdict(list)
    for model in models:
        for node in model.graph.all_nodes():
            nodes[f"{node.domain}::{node.op_type}" if node.domain else node.op_type].append(node)
    work = {op: sum(map(_products, found)) for op, found in nodes.items()}
    total = sum(work.values()) or 1
    order = list(Class)
    rows = [_describe(op, found, work[op] / total) for op, found in nodes.items()]
    return sorted(rows, key=lambda row: (order.index(Class(row.kind)), row.op))


def _describe(op: str, nodes: Sequence[ir.Node], share: float) -> OperatorRow:
    kind = _CLASS_OF.get(op, Class.UNSUPPORTED)
    outputs = [value for node in nodes for value in node.outputs]
    known = [tuple(value.shape) for value in outputs if value.shape is not None]
    axes = sorted({str(dim.value) for shape in known for dim in shape if not isinstance(dim, int) and dim.value is not None})
    sized = sorted({tuple(str(dim if isinstance(dim, int) else dim.value) for dim in shape) for shape in known}, key=lambda s: (len(s), s))
    return OperatorRow(
        op=op,
        kind=kind.value,
        count=len(nodes),
        dtypes=tuple(sorted({value.dtype.name.lower() for value in outputs if value.dtype is not None})),
        shapes=" … ".join(dict.fromkeys("x".join(shape) or "scalar" for shape in (sized[:1] + sized[-1:]))),
        axes=tuple(axes),
        tolerance=_TOLERANCES.get(op, "as its call"),
        share=round(share, 4),
        example=nodes[0].name or op,
        note=_NOTES[kind],
    )


def _products(node: ir.Node) -> float:
    """Multiplications for one token that sees `_DEPTH` others."""
    shapes = [value.shape for value in node.inputs if value is not None and value.shape is not None]
    if node.op_type == "Attention" and shapes:
        width = shapes[0][-1]
        return 2.0 * _DEPTH * width if isinstance(width, int) else 0.0
    if node.op_type not in {"MatMul", "Gemm", "MoE"} or not shapes:
        return 0.0
    sizes = [math.prod(dim for dim in shape if isinstance(dim, int)) for shape in shapes[1:] if all(isinstance(d, int) for d in shape)]
    return float(max(sizes, default=0))


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
