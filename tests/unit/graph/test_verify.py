from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from calstack.errors import SourceError
from calstack.frontends import open_source
from calstack.frontends.arch import build_graphs
from calstack.graph.verify import verify
from calstack.graph.walk import kv_layers, weights_of
from calstack.specs import ModelSpec, RopeSpec
from tests.support.gguf_files import DATA


def model() -> ir.Model:
    return open_source(DATA / "tiny-qwen3").prefill


def node(graph: ir.Graph, op: str) -> ir.Node:
    return next(n for n in graph if n.op_type == op)


def drop_input(name: str) -> Callable[[ir.Graph], object]:
    return lambda graph: graph.inputs.remove(next(v for v in graph.inputs if v.name == name))


def drop_output(name: str) -> Callable[[ir.Graph], object]:
    return lambda graph: graph.outputs.remove(next(v for v in graph.outputs if v.name == name))


def set_dtype(graph: ir.Graph) -> None:
    graph.inputs[0].dtype = ir.DataType.FLOAT


def symbolic_heads(graph: ir.Graph) -> None:
    next(v for v in graph.inputs if v.name == "kv.1.v").shape = ir.Shape(["batch", "heads", "past", 32])


def huge_head(graph: ir.Graph) -> None:
    next(v for v in graph.inputs if v.name == "kv.1.v").shape = ir.Shape(["batch", 2, "past", 1 << 40])


def external_constant(graph: ir.Graph) -> None:
    shape = ir.Shape([16])
    tensor = ir.ExternalTensor("weights.bin", 0, 64, ir.DataType.FLOAT, shape=shape, name="x")
    graph.initializers["model.rotary_emb.inv_freq"].const_value = tensor


def short_constant(graph: ir.Graph) -> None:
    proto = onnx.TensorProto(dims=[1 << 20], data_type=1, raw_data=b"1234", name="x")
    graph.initializers["model.rotary_emb.inv_freq"].const_value = ir.serde.deserialize_tensor(proto)


def huge_constant(graph: ir.Graph) -> None:
    proto = onnx.TensorProto(dims=[1 << 40], data_type=1, raw_data=b"1234", name="x")
    graph.initializers["model.rotary_emb.inv_freq"].const_value = ir.serde.deserialize_tensor(proto)


def no_data(graph: ir.Graph) -> None:
    graph.initializers["model.norm.weight"].const_value = None


def old_opset(graph: ir.Graph) -> None:
    graph.opset_imports[""] = 18


def late_producer(graph: ir.Graph) -> None:
    first = node(graph, "Gather")
    graph.remove(first)
    graph.append(first)


def twice(graph: ir.Graph) -> None:
    node(graph, "Cos").outputs[0].name = node(graph, "Sin").outputs[0].name


def external_attribute(graph: ir.Graph) -> None:
    tensor = ir.ExternalTensor("/etc/passwd", 0, 4, ir.DataType.FLOAT, shape=ir.Shape([1]), name="x")
    node(graph, "Cos").attributes["value"] = ir.AttrTensor("value", tensor)


def nested_graph(graph: ir.Graph) -> None:
    node(graph, "Cos").attributes["body"] = ir.AttrGraph("body", ir.Graph([], [], nodes=[], name="body"))


def stranger(graph: ir.Graph) -> None:
    graph.inputs.append(ir.Value(name="surprise", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1])))


def stray_output(graph: ir.Graph) -> None:
    graph.outputs.append(node(graph, "Cos").outputs[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (old_opset, "opset 18"),
        (drop_input("positions"), "'positions': it is missing"),
        (set_dtype, "'input_ids': its type"),
        (drop_input("kv.1.v"), r"'kv\.1\.v': it is missing"),
        (symbolic_heads, r"kv\.1\.v.*must be numbers"),
        (drop_output("kv.1.v.out"), r"'kv\.1\.v\.out': it is missing"),
        (drop_output("logits"), "'logits': it is missing"),
        (huge_head, r"kv\.1\.v.*from 1 to 1024"),
        (external_constant, r"inv_freq.*small and inside"),
        (huge_constant, r"inv_freq.*small and inside"),
        (short_constant, r"inv_freq.*do not fit"),
        (no_data, r"model\.norm\.weight.*no data"),
        (late_producer, "made nowhere before it"),
        (twice, "made twice"),
        (external_attribute, "external data"),
        (nested_graph, "a graph inside a node"),
        (stranger, "'surprise'"),
        (stray_output, "this output has no meaning"),
    ],
)
def test_a_broken_rule_is_named(change: Callable[[ir.Graph], object], message: str) -> None:
    broken = model()
    change(broken.graph)
    with pytest.raises(SourceError, match=message):
        verify(broken, "x.onnx")


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3"])
def test_built_graphs_keep_the_rules(name: str) -> None:
    bundle = open_source(DATA / name)
    verify(bundle.prefill, "prefill")
    verify(bundle.decode, "decode")
    assert kv_layers(bundle.decode.graph) == (0, 1, 2)


def test_weights_are_the_initializers_but_frequencies_and_constants() -> None:
    graph = model().graph
    constants = set(graph.initializers) - set(weights_of(graph))
    assert "model.rotary_emb.inv_freq" in constants
    assert all("weight" not in name for name in constants)


def test_weight_floats_are_read_only_when_asked() -> None:
    graph = model().graph
    value = graph.initializers["model.norm.weight"].const_value
    assert isinstance(value, ir.LazyTensor)
    assert value.numpy() is not value.numpy()
    assert np.array_equal(value.numpy(), value.numpy())


def test_a_large_decoder_is_built_in_under_two_seconds() -> None:
    spec = ModelSpec(
        arch="qwen3",
        name="x",
        layers=36,
        hidden=4096,
        intermediate=12288,
        heads=32,
        kv_heads=8,
        head_dim=128,
        vocab=151936,
        context=40960,
        rope=RopeSpec(dim=128, theta=1e6),
        qk_norm=True,
    )
    start = time.monotonic()
    prefill, decode = build_graphs(spec).values()
    assert time.monotonic() - start < 2.0  # about 0.4 s; both graphs
    assert prefill.graph.num_nodes() == decode.graph.num_nodes() > 1000
