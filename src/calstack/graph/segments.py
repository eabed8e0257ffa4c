"""Cuts a graph into consecutive segments whose weights fit a budget; each segment is a model of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import onnx_ir as ir

__all__ = ["Segment", "split_graph"]

_SMALL = 1 << 16  # constants up to this size stay inside the model, so that onnxruntime can fold them


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A run of nodes as a model whose weights are inputs too."""

    model: ir.Model
    inputs: tuple[str, ...]  # activations that come in
    outputs: tuple[str, ...]
    weights: Mapping[str, ir.TensorProtocol]  # inputs that are large initializers
    last_use: tuple[str, ...]  # activations that no later segment reads


def split_graph(model: ir.Model, budget_bytes: int) -> list[Segment]:
    """Segments in execution order. A segment holds at least one node, so one weight above the budget still gets its turn."""
    runs = _runs(list(model.graph), budget_bytes)
    used_after = _used_after(runs, {v.name or "" for v in model.graph.outputs})
    return [_segment(model, run, later) for run, later in zip(runs, used_after, strict=True)]


def _runs(nodes: Sequence[ir.Node], budget: int) -> list[list[ir.Node]]:
    runs: list[list[ir.Node]] = [[]]
    held: dict[str, int] = {}
    for node in nodes:
        fresh = {v.name or "": _nbytes(v) for v in node.inputs if v is not None and v.is_initializer() and (v.name or "") not in held}
        if runs[-1] and sum(held.values()) + sum(fresh.values()) > budget:
            runs.append([])
            held = {}
            fresh = {v.name or "": _nbytes(v) for v in node.inputs if v is not None and v.is_initializer()}
        runs[-1].append(node)
        held |= fresh
    return runs


def _nbytes(value: ir.Value) -> int:
    return 0 if value.const_value is None else value.const_value.nbytes


def _used_after(runs: Sequence[Sequence[ir.Node]], outputs: set[str]) -> list[set[str]]:
    used, result = set(outputs), []
    for run in reversed(runs):
        result.append(set(used))
        used |= {v.name or "" for node in run for v in node.inputs if v is not None}
    return result[::-1]


def _segment(model: ir.Model, run: Sequence[ir.Node], later: set[str]) -> Segment:
    made = {v.name or "": v for node in run for v in node.outputs if v.name}
    read = {v.name or "": v for node in run for v in node.inputs if v is not None and v.name not in made}
    constants = {name: v for name, v in read.items() if v.is_initializer() and _nbytes(v) <= _SMALL}
    weights = {name: v for name, v in read.items() if v.is_initializer() and name not in constants}
    activations = {name: v for name, v in read.items() if not v.is_initializer()}
    outputs = [name for name in made if name in later]
    return Segment(
        model=_as_model(model, run, [*activations.values(), *weights.values()], list(constants.values()), outputs),
        inputs=tuple(activations),
        outputs=tuple(outputs),
        weights={name: v.const_value for name, v in weights.items() if v.const_value is not None},
        last_use=tuple(name for name in activations if name not in later),
    )


def _as_model(
    model: ir.Model, run: Sequence[ir.Node], inputs: Sequence[ir.Value], constants: Sequence[ir.Value], outputs: Sequence[str]
) -> ir.Model:
    # Values belong to the graph that made them: the segment gets copies under the same names.
    values = {v.name or "": ir.Value(name=v.name, type=v.type, shape=v.shape) for v in inputs}
    values |= {v.name or "": ir.Value(name=v.name, type=v.type, shape=v.shape, const_value=v.const_value) for v in constants}
    nodes = []
    for node in run:
        made = [ir.Value(name=v.name, type=v.type, shape=v.shape) for v in node.outputs]
        taken = [None if v is None else values[v.name or ""] for v in node.inputs]
        nodes.append(ir.Node(node.domain, node.op_type, taken, list(node.attributes.values()), outputs=made, name=node.name))
        values |= {v.name or "": v for v in made}
    graph = ir.Graph(
        [values[v.name or ""] for v in inputs],
        [values[name] for name in outputs],
        nodes=nodes,
        initializers=[values[v.name or ""] for v in constants],
        opset_imports=dict(model.graph.opset_imports),
        name="segment",
    )
    return ir.Model(graph, ir_version=model.ir_version, functions=list(model.functions.values()))
