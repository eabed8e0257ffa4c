"""Edits a directory of `--keep-onnx` as a user with ONNX tools would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir

GRAPHS = ("prefill.onnx", "decode.onnx")


def edit(directory: Path, change: Callable[[ir.Graph], object], graphs: tuple[str, ...] = GRAPHS) -> None:
    """Apply `change` to the graphs; data stay external where they are."""
    for name in graphs:
        model = ir.load(directory / name)
        change(model.graph)
        (directory / name).write_bytes(ir.to_proto(model).SerializeToString())


def remove_layer(graph: ir.Graph, layer: int) -> None:
    """Cut one layer out: what fed its first norm feeds what its last sum fed."""
    scope = f"model.layers.{layer}."
    nodes = [node for node in graph if any((v.name or "").startswith("v_" + scope) for v in node.outputs)]
    first, last = nodes[0].inputs[0], nodes[-1].outputs[0]
    assert first is not None
    for use in tuple(last.uses()):
        use.node.replace_input_with(use.idx, first)
    for values in (graph.inputs, graph.outputs):
        for value in [v for v in values if (v.name or "").startswith(f"kv.{layer}.")]:
            values.remove(value)
    graph.remove(nodes, safe=True)
    for name in [name for name in graph.initializers if name.startswith(scope)]:
        del graph.initializers[name]


def change_weight(directory: Path, name: str, *, add: float = 0.25) -> None:
    """Add to one element of a weight, in the data file that both graphs share."""
    data = ir.load(directory / "prefill.onnx").graph.initializers[name].const_value
    assert isinstance(data, ir.ExternalTensor)
    values = np.memmap(directory / str(data.location), np.float32, "r+", offset=data.offset or 0, shape=tuple(data.shape.numpy()))
    values.reshape(-1)[3] += add
    values.flush()
