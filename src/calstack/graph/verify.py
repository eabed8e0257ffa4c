"""The rules of a decoder graph as code: checked when a graph is built, and when one is read from a directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import onnx_ir as ir

from calstack.errors import SourceError
from calstack.graph.moe import DOMAIN, NAME, is_moe, same_body
from calstack.graph.names import (
    CUR_LEN,
    EMBEDDING,
    HIDDEN,
    INPUT_IDS,
    LOGITS,
    PAST_LEN,
    POSITIONS,
    SCORES,
    TYPE_IDS,
    is_kv,
    kv_in,
    kv_out,
)
from calstack.graph.walk import kv_layers, name_of, read_values, weights_of

__all__ = ["OPSETS", "verify"]

OPSETS = range(23, 25)  # with Attention, RMSNormalization and RotaryEmbedding, and native kernels in onnxruntime
_ENCODER_INPUTS = {INPUT_IDS: 2, POSITIONS: 2, TYPE_IDS: 2, CUR_LEN: 1}  # ranks
_ENCODER_OUTPUTS = {HIDDEN: 3, EMBEDDING: 2, SCORES: 2}
_MAX_NODES = 1_000_000
_MAX_DIM = 1024
_MAX_CONSTANT_BYTES = 1 << 24

Broken = Iterator[tuple[str, str]]  # where, what


def verify(model: ir.Model, where: str, *, encoder: bool = False) -> None:
    """Raise SourceError naming the first broken rule and its node or value."""
    for rule in _ENCODER_RULES if encoder else _DECODER_RULES:
        for place, what in rule(model):
            raise SourceError(what, where=f"{where}: {place}" if place else where, remedy="keep the canonical form of graph/model.py")


def _opset(model: ir.Model) -> Broken:
    version = model.graph.opset_imports.get("")
    if version not in OPSETS:
        yield "opset_import", f"opset {version} is not among {list(OPSETS)}"
    if model.graph.num_nodes() > _MAX_NODES:
        yield "", f"{model.graph.num_nodes()} nodes are more than {_MAX_NODES}"


def _inputs(model: ir.Model) -> Broken:
    inputs = {name_of(value): value for value in model.graph.inputs}
    for name in (INPUT_IDS, POSITIONS):
        yield from _is_tensor(inputs.get(name), name, ir.DataType.INT64, 2)
    for name in inputs:
        if name not in {INPUT_IDS, POSITIONS, PAST_LEN} and not is_kv(name):
            yield f"input {name[:80]!r}", "this input has no meaning here"


def _is_tensor(value: ir.Value | None, name: str, dtype: ir.DataType, rank: int) -> Broken:
    if value is None:
        yield f"{name[:80]!r}", "it is missing"
    elif value.dtype != dtype:
        yield f"{name[:80]!r}", f"its type is {value.dtype}, expected {dtype}"
    elif value.shape is None or len(value.shape) != rank:
        yield f"{name[:80]!r}", f"its shape is {value.shape}, expected {rank} dimensions"


def _kv(model: ir.Model) -> Broken:
    layers = kv_layers(model.graph)
    if not layers:
        yield "inputs", "there is no KV input: a decoder has at least one layer"
    for layer in layers:
        yield from _kv_of_layer(model.graph, layer)
    names = {name_of(value) for value in model.graph.inputs}
    for name in map(name_of, model.graph.outputs):
        if name != LOGITS and not (name.endswith(".out") and name.removesuffix(".out") in names):
            yield f"output {name[:80]!r}", "this output has no meaning here"


def _kv_of_layer(graph: ir.Graph, layer: int) -> Broken:
    inputs = {name_of(value): value for value in graph.inputs}
    outputs = {name_of(value) for value in graph.outputs}
    for which in "kv":
        name = kv_in(layer, which)
        yield from _is_tensor(inputs.get(name), name, ir.DataType.FLOAT, 4)
        shape = inputs[name].shape
        heads, size = (shape[1], shape[3]) if shape is not None else (None, None)
        if not (isinstance(heads, int) and isinstance(size, int) and 1 <= heads <= _MAX_DIM and 1 <= size <= _MAX_DIM):
            yield f"input {name!r}", f"its heads and head size must be numbers from 1 to {_MAX_DIM}"
        if kv_out(layer, which) not in outputs:
            yield f"output {kv_out(layer, which)!r}", "it is missing"


def _logits(model: ir.Model) -> Broken:
    outputs = {name_of(value): value for value in model.graph.outputs}
    yield from _is_tensor(outputs.get(LOGITS), LOGITS, ir.DataType.FLOAT, 3)


def _encoder_ends(model: ir.Model) -> Broken:
    inputs = {name_of(value): value for value in model.graph.inputs}
    for name, rank in _ENCODER_INPUTS.items():
        yield from _is_tensor(inputs.get(name), name, ir.DataType.INT64, rank)
    for name in inputs:
        if name not in _ENCODER_INPUTS:
            yield f"input {name[:80]!r}", "this input has no meaning here"
    for value in model.graph.outputs:
        if (name := name_of(value)) not in _ENCODER_OUTPUTS:
            yield f"output {name[:80]!r}", "this output has no meaning here"
        else:
            yield from _is_tensor(value, name, ir.DataType.FLOAT, _ENCODER_OUTPUTS[name])
    if not model.graph.outputs:
        yield "outputs", "there is none"


def _initializers(model: ir.Model) -> Broken:
    for name, value in model.graph.initializers.items():
        if value.const_value is None or value.shape is None:
            yield f"initializer {name[:80]!r}", "it has no data"
        elif not all(isinstance(dim, int) and dim >= 0 for dim in value.shape):
            yield f"initializer {name[:80]!r}", f"its shape {value.shape} is not a list of numbers"


def _constants(model: ir.Model) -> Broken:
    """What is not a weight (shapes, frequencies, scalars) is small, inside the file, and whole."""
    weights = weights_of(model.graph)
    for name, value in model.graph.initializers.items():
        data = value.const_value
        if name in weights or data is None:
            continue
        if isinstance(data, ir.ExternalTensor) or data.nbytes > _MAX_CONSTANT_BYTES:
            yield f"initializer {name[:80]!r}", "a constant that is no weight must be small and inside the graph's file"
        elif not _is_whole(data):
            yield f"initializer {name[:80]!r}", "its data do not fit its shape"


def _is_whole(data: ir.TensorProtocol) -> bool:
    try:
        return tuple(data.numpy().shape) == tuple(data.shape.numpy())
    except Exception:  # noqa: BLE001  # whatever a damaged tensor raises
        return False


def _values(model: ir.Model) -> Broken:
    """Every value is made before it is read, and once."""
    known = {name_of(v) for v in model.graph.inputs} | set(model.graph.initializers)
    for node in model.graph:
        for value in read_values(node):
            if name_of(value) not in known:
                yield f"node {_shown(node)}", f"its input {name_of(value)[:80]!r} is made nowhere before it"
        for value in node.outputs:
            if name_of(value) in known:
                yield f"node {_shown(node)}", f"its output {name_of(value)[:80]!r} is made twice"
            known |= {name_of(value)} - {""}
    for value in model.graph.outputs:
        if name_of(value) not in known:
            yield f"output {name_of(value)[:80]!r}", "no node makes it"


def _nodes(model: ir.Model) -> Broken:
    for node in model.graph:
        for attribute in node.attributes.values():
            if attribute.type in {ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS}:
                yield f"node {_shown(node)}", "a graph inside a node is not supported"
            if attribute.type == ir.AttributeType.TENSOR and isinstance(attribute.value, ir.ExternalTensor):
                yield f"node {_shown(node)}", "an attribute with external data is not supported"


def _functions(model: ir.Model) -> Broken:
    """Only the expert function, and with the standard body: the compiler takes its call for what the body says."""
    for domain, name, *_ in model.functions:
        if (domain, name) != (DOMAIN, NAME):
            yield f"function {name[:80]!r}", "this function has no meaning here"
    for function in model.functions.values():
        if not same_body(function):
            yield f"function {function.name[:80]!r}", "its body is not the standard one of graph/moe.py"
    for node in model.graph:
        if is_moe(node) and not model.functions:
            yield f"node {_shown(node)}", "its function is missing"


def _shown(node: ir.Node) -> str:
    name = node.name or (name_of(node.outputs[0]) if node.outputs else "")
    return f"{name[:80]!r} ({node.op_type[:40]})"


_ALL: tuple[Callable[[ir.Model], Broken], ...] = (_initializers, _constants, _values, _nodes, _functions)
_DECODER_RULES = (_opset, _inputs, _kv, _logits, *_ALL)
_ENCODER_RULES = (_opset, _encoder_ends, *_ALL)
