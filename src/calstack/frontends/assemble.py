"""From a checked ModelSpec and its weights to the graphs that carry them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import onnx_ir as ir

from calstack.errors import UnsupportedError
from calstack.frontends.arch import build_graphs, family_of
from calstack.frontends.reading import bad
from calstack.graph.names import KIND_KEY
from calstack.specs import Role

if TYPE_CHECKING:
    from calstack.graph.model import StoredTensor
    from calstack.specs import ModelSpec

__all__ = ["attach", "attach_weights", "check_layers", "lazy"]

_LAYER = re.compile(r"(?:model\.layers|encoder\.layer)\.(\d+)\.")


def lazy(tensor: StoredTensor) -> ir.LazyTensor:
    """The float value of a stored tensor, read each time it is asked for."""
    return ir.LazyTensor(
        lambda: ir.tensor(tensor.float32(), name=tensor.name),
        dtype=ir.DataType.FLOAT,
        shape=ir.Shape(tensor.shape),
        name=tensor.name,
    )


def attach(value: ir.Value, tensor: StoredTensor) -> None:
    """Give an initializer its weight and say how the source stores it."""
    value.const_value = lazy(tensor)
    value.metadata_props[KIND_KEY] = tensor.kind


def check_layers(spec: ModelSpec, names: Iterable[str], path: Path, field: str) -> None:
    """The weights name exactly the layers that the metadata promises (before a graph of that many layers is built)."""
    found = {int(m[1]) for name in names if (m := _LAYER.match(name))}
    if len(found) != spec.layers or (found and max(found) != spec.layers - 1):
        bad(path, field, f"{spec.layers} layers are promised, the weights hold {len(found)}")


def attach_weights(
    spec: ModelSpec,
    tensors: Mapping[str, StoredTensor],
    *,
    path: Path,
    source_name: Callable[[str], str] = str,
) -> tuple[dict[Role, ir.Model], dict[str, StoredTensor]]:
    """Build the graphs, attach the weights, and give the weights in graph order.

    Raises SourceError for a missing tensor or a wrong shape, UnsupportedError for a tensor that the graphs do not use.
    `source_name` turns an initializer name into the source's name for messages.
    """
    graphs = build_graphs(spec)
    first = next(iter(graphs.values()))
    needed = {name: value for name, value in first.graph.initializers.items() if value.const_value is None}
    for name, value in needed.items():
        _check(name, value, tensors, path, source_name(name))
    optional = family_of(spec.arch, str(path)).optional
    for name in tensors:
        if name not in needed and not name.startswith(optional):
            raise UnsupportedError(
                f"{spec.arch} models with this tensor are not supported",
                where=f"{path}: tensor {source_name(name)!r}",
                remedy="use a plain checkpoint of this architecture",
            )
    for model in graphs.values():
        for name in needed:
            attach(model.graph.initializers[name], tensors[name])
    return graphs, {name: tensors[name] for name in needed}


def _check(name: str, value: ir.Value, tensors: Mapping[str, StoredTensor], path: Path, shown: str) -> None:
    if name not in tensors:
        bad(path, f"tensor {shown!r}", "the tensor is missing")
    expected = tuple(value.shape.numpy()) if value.shape is not None else ()
    if tensors[name].shape != expected:
        bad(path, f"tensor {shown!r}", f"the shape is {list(tensors[name].shape)}, expected {list(expected)}")
