"""The expert function: what its body means, and that another body is noticed."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from calstack.errors import SourceError
from calstack.frontends import open_source
from calstack.graph.moe import is_moe, moe_function, same_body
from calstack.graph.verify import verify
from tests.support.gguf_files import DATA


def run(x: np.ndarray, weights: list[np.ndarray], **attributes: int) -> np.ndarray:
    import onnxruntime as ort

    function = moe_function()
    arrays = [x, *weights]
    inputs = [ir.Value(name=f"i{n}", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(array.shape)) for n, array in enumerate(arrays)]
    node = ir.node("MoE", inputs, attributes, domain=function.domain, outputs=[ir.Value(name="y", type=ir.TensorType(ir.DataType.FLOAT))])
    graph = ir.Graph(inputs, node.outputs, nodes=[node], opset_imports={"": 24, function.domain: 1}, name="g")
    proto = ir.to_proto(ir.Model(graph, ir_version=11, functions=[function]))
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    result: np.ndarray = session.run(None, {f"i{n}": array for n, array in enumerate(arrays)})[0]
    return result


def by_hand(x: np.ndarray, weights: list[np.ndarray], top_k: int, renormalise: int) -> np.ndarray:
    router, gate, up, down = (w.astype(np.float64) for w in weights)
    rows = x.reshape(-1, x.shape[-1]).astype(np.float64)
    out = np.zeros_like(rows)
    for index, row in enumerate(rows):
        p = np.exp(router @ row - (router @ row).max())
        p /= p.sum()
        chosen = np.argsort(-p, kind="stable")[:top_k]
        total = p[chosen].sum() if renormalise else 1.0
        for e in chosen:
            g = gate[e] @ row
            out[index] += p[e] / total * (down[e] @ (g / (1 + np.exp(-g)) * (up[e] @ row)))
    return out.reshape(x.shape)


@pytest.mark.parametrize(("top_k", "renormalise"), [(1, 1), (3, 1), (3, 0), (6, 0)])
def test_the_body_is_the_definition(top_k: int, renormalise: int) -> None:
    random = np.random.default_rng(3)
    shapes = [(2, 5, 8), (6, 8), (6, 10, 8), (6, 10, 8), (6, 8, 10)]
    x, *weights = (random.standard_normal(shape).astype(np.float32) for shape in shapes)
    got = run(x, weights, top_k=top_k, renormalise=renormalise)
    want = by_hand(x, weights, top_k, renormalise)
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()


def test_a_graph_with_the_standard_body_is_good_and_survives_a_file() -> None:
    model = ir.from_proto(ir.to_proto(open_source(DATA / "tiny-qwen3-moe").decode))
    verify(model, "m")
    nodes = [node for node in model.graph if is_moe(node)]
    assert [(n.attributes["top_k"].as_int(), n.attributes["renormalise"].as_int()) for n in nodes] == [(3, 1), (3, 1)]


def test_another_body_is_refused() -> None:
    model = open_source(DATA / "tiny-qwen3-moe").decode
    function = next(iter(model.functions.values()))
    assert same_body(function)
    softmax = next(node for node in function if node.op_type == "Softmax")
    softmax.attributes["axis"] = ir.AttrInt64("axis", 0)
    assert not same_body(function)
    with pytest.raises(SourceError, match="MoE"):
        verify(model, "m")


def test_a_call_without_its_function_is_refused() -> None:
    model = open_source(DATA / "tiny-qwen3-moe").decode
    model.functions.clear()
    with pytest.raises(SourceError, match="MoE"):
        verify(model, "m")
