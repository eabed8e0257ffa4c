"""Fusion of the canonical graphs, and each rule's reason when a graph departs from them."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from calstack.compiler.fuse.ops import DOMAIN
from calstack.compiler.pipeline import FUSION, fuse_graph
from calstack.errors import UnsupportedError
from tests.support.tiny import TINY, bundle


def changed(change: Callable[[ir.Graph], object], name: str = "tiny-llama") -> ir.Model:
    model = bundle(name).prefill.clone()
    change(model.graph)
    return model


def nodes(graph: ir.Graph, op: str) -> list[ir.Node]:
    return [node for node in graph if node.op_type == op]


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_canonical_graph_fuses_completely(name: str, role: str) -> None:
    graph = fuse_graph(getattr(bundle(name), role))
    layers = bundle(name).spec.layers
    assert {node.domain for node in graph} == {DOMAIN}
    assert Counter(node.op_type for node in graph) == {
        "Embed": 1,
        "RopeTable": 1,
        "NormLinear": 2 * layers,
        "QkNormRopeKv": layers,
        "Attention": layers,
        "Residual": 2 * layers,
        "LmHead": 1,
    }


def test_fusion_leaves_the_model_it_was_given_untouched() -> None:
    before = [node.op_type for node in bundle("tiny-llama").prefill.graph]
    fuse_graph(bundle("tiny-llama").prefill)
    assert [node.op_type for node in bundle("tiny-llama").prefill.graph] == before


def test_per_head_norms_reach_the_kv_call() -> None:
    for name, inputs in (("tiny-llama", 3), ("tiny-qwen3", 5)):
        assert {len(node.inputs) for node in nodes(fuse_graph(bundle(name).prefill), "QkNormRopeKv")} == {inputs}


def test_rules_have_names_of_their_own() -> None:
    names = [rule.name for rule in FUSION]
    assert len(set(names)) == len(names)


def value(node: ir.Node, name: str, new: Any) -> None:
    node.attributes[name] = ir.AttrInt64(name, int(new)) if isinstance(new, int) else ir.AttrFloat32(name, float(new))


def constant(graph: ir.Graph, before: ir.Node, number: float) -> ir.Value:
    made = ir.node("Constant", [], {"value": ir.tensor(np.float32(number))})
    graph.insert_before(before, made)
    return made.outputs[0]


def wrap(graph: ir.Graph, target: ir.Value, op: str, *others: ir.Value, first: bool = True) -> ir.Value:
    """Put `op` between `target` and its readers."""
    users = list(target.uses())
    node = ir.node(op, [target, *others] if first else [*others, target])
    producer = target.producer()
    assert producer is not None
    graph.insert_after(producer, node)
    for use in users:
        use.node.replace_input_with(use.idx, node.outputs[0])
    return node.outputs[0]


def scaled_embedding(graph: ir.Graph) -> None:
    gather = nodes(graph, "Gather")[0]
    wrap(graph, gather.outputs[0], "Mul", constant(graph, gather, 8.0))


def test_embedding_scale_becomes_part_of_the_embedding() -> None:
    embed = nodes(fuse_graph(changed(scaled_embedding)), "Embed")[0]
    assert embed.attributes["scale"].value == 8.0


def scaled_table(graph: ir.Graph) -> None:
    for op in ("Cos", "Sin"):
        node = nodes(graph, op)[0]
        wrap(graph, node.outputs[0], "Mul", constant(graph, nodes(graph, "Cos")[0], 1.25))


def test_attention_factor_becomes_part_of_the_table() -> None:
    table = nodes(fuse_graph(changed(scaled_table)), "RopeTable")[0]
    assert table.attributes["attention_factor"].value == 1.25


def soft_capped(graph: ir.Graph) -> None:
    logits = graph.outputs[0]
    last = logits.producer()
    assert last is not None
    cap = constant(graph, last, 30.0)
    chain = [ir.node("Div", [logits, cap])]
    chain.append(ir.node("Tanh", [chain[0].outputs[0]]))
    chain.append(ir.node("Mul", [chain[1].outputs[0], cap]))
    graph.insert_after(last, chain)
    graph.outputs[0] = chain[2].outputs[0]


def test_soft_cap_of_logits_becomes_part_of_the_head() -> None:
    graph = fuse_graph(changed(soft_capped))
    assert nodes(graph, "LmHead")[0].attributes["softcap"].value == 30.0


def plus_one(graph: ir.Graph) -> None:
    norm = nodes(graph, "RMSNormalization")[0]
    add = ir.node("Add", [norm.inputs[1], constant(graph, norm, 1.0)])
    graph.insert_before(norm, add)
    norm.replace_input_with(1, add.outputs[0])


def test_norm_weight_plus_one_is_remembered() -> None:
    flags = [node.attributes["plus_one"].value for node in nodes(fuse_graph(changed(plus_one)), "NormLinear")]
    assert flags[0] == 1
    assert not any(flags[1:])


def swish(graph: ir.Graph) -> None:
    sigmoid = nodes(graph, "Sigmoid")[0]
    product = sigmoid.outputs[0].uses()[0].node
    node = ir.node("Swish", [sigmoid.inputs[0]])
    graph.insert_before(product, node)
    ir.convenience.replace_all_uses_with(product.outputs[0], node.outputs[0])


def gelu(graph: ir.Graph) -> None:
    sigmoid = nodes(graph, "Sigmoid")[0]
    product = sigmoid.outputs[0].uses()[0].node
    node = ir.node("Gelu", [sigmoid.inputs[0]], {"approximate": "tanh"})
    graph.insert_before(product, node)
    ir.convenience.replace_all_uses_with(product.outputs[0], node.outputs[0])


@pytest.mark.parametrize(("change", "activation"), [(swish, "silu"), (gelu, "gelu_tanh")])
def test_other_spellings_of_the_gate_are_understood(change: Callable[[ir.Graph], object], activation: str) -> None:
    gated = [node for node in nodes(fuse_graph(changed(change)), "NormLinear") if node.attributes["activation"].value]
    assert gated[0].attributes["activation"].value == activation


def biased(graph: ir.Graph) -> None:
    """A bias on every q, k and v of layer 0."""
    attention = nodes(graph, "Attention")[0]
    for index in range(3):
        made = attention.inputs[index].producer()
        product = made if made.op_type == "MatMul" else made.inputs[0].producer()
        width = product.inputs[1].producer().inputs[0].shape[0]
        bias = ir.Value(name=f"bias.{index}", shape=ir.Shape([width]), type=ir.TensorType(ir.DataType.FLOAT))
        bias.const_value = ir.tensor(np.zeros(width, np.float32), name=bias.name)
        graph.register_initializer(bias)
        wrap(graph, product.outputs[0], "Add", bias)


def test_biases_of_a_projection_become_part_of_its_call() -> None:
    linears = nodes(fuse_graph(changed(biased)), "NormLinear")
    assert [len(node.inputs) for node in linears[:2]] == [2 + 3 + 3, 2 + 2]


# --- what does not fit ---------------------------------------------------------------------------------------------------


def not_causal(graph: ir.Graph) -> None:
    value(nodes(graph, "Attention")[0], "is_causal", 0)


def interleaved(graph: ir.Graph) -> None:
    value(nodes(graph, "RotaryEmbedding")[0], "interleaved", 1)


def wrong_heads(graph: ir.Graph) -> None:
    value(nodes(graph, "RotaryEmbedding")[0], "num_heads", 1)


def not_transposed(graph: ir.Graph) -> None:
    nodes(graph, "Transpose")[0].attributes["perm"] = ir.AttrInt64s("perm", [0, 1])


def two_tables(graph: ir.Graph) -> None:
    rotary = nodes(graph, "RotaryEmbedding")[0]
    rotary.replace_input_with(1, rotary.inputs[2])


def gathered_past(graph: ir.Graph) -> None:
    attention = nodes(graph, "Attention")[0]
    same = ir.node("Identity", [attention.inputs[4]])
    graph.insert_before(attention, same)
    attention.replace_input_with(4, same.outputs[0])


def extra_scale(graph: ir.Graph) -> None:
    attention = nodes(graph, "Attention")[0]
    wrap(graph, attention.outputs[0], "Mul", constant(graph, attention, 2.0))


def uneven_scale(graph: ir.Graph) -> None:
    cos = nodes(graph, "Cos")[0]
    wrap(graph, cos.outputs[0], "Mul", constant(graph, cos, 2.0))


def other_axis(graph: ir.Graph) -> None:
    value(nodes(graph, "RMSNormalization")[0], "axis", 1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (not_causal, "is not causal"),
        (interleaved, "interleaved"),
        (wrong_heads, "rotated as 1 heads"),
        (not_transposed, "not Transpose"),
        (two_tables, "one table"),
        (gathered_past, "past is no graph input"),
        (extra_scale, "Mul"),
        (uneven_scale, "cos is scaled by 2.0"),
        (other_axis, "another axis"),
    ],
)
def test_a_departure_is_refused_with_the_rules_reason(change: Callable[[ir.Graph], object], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        fuse_graph(changed(change))


def window_graph(change: Callable[[ir.Graph], object]) -> ir.Graph:
    return fuse_graph(changed(change, "tiny-mistral"))


def test_the_mask_of_a_sliding_window_becomes_a_number() -> None:
    graph = window_graph(lambda _: None)
    assert {node.domain for node in graph} == {DOMAIN}
    assert [node.attributes["window"].as_int() for node in nodes(graph, "Attention")] == [24, 24]


def operand(op: str, index: int, new: Callable[[ir.Graph], ir.Value]) -> Callable[[ir.Graph], None]:
    def change(graph: ir.Graph) -> None:
        node = [node for node in graph if node.op_type == op][-1]
        node.replace_input_with(index, new(graph))

    return change


def constant_of(number: float, dtype: Any = np.int64) -> Callable[[ir.Graph], ir.Value]:
    def make(graph: ir.Graph) -> ir.Value:
        value = ir.Value(name="new", const_value=ir.tensor(np.asarray(number, dtype), name="new"))
        graph.register_initializer(value)
        return value

    return make


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (operand("Less", 1, constant_of(0)), "its window is 0"),
        (operand("Range", 0, constant_of(1)), "not the one of a sliding window"),
        (operand("Range", 2, constant_of(2)), "not the one of a sliding window"),
        (operand("Unsqueeze", 0, lambda graph: graph.inputs[0]), "not the one of a sliding window"),
        (lambda graph: next(n for n in graph if n.op_type == "Less").replace_input_with(0, graph.inputs[0]), "not the one of a sliding"),
    ],
)
def test_another_mask_is_refused_with_its_reason(change: Callable[[ir.Graph], object], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        window_graph(change)


def test_a_rope_table_of_something_else_than_positions_is_refused() -> None:
    def change(graph: ir.Graph) -> None:
        next(node for node in graph if node.op_type == "Unsqueeze").replace_input_with(0, graph.inputs[0])

    with pytest.raises(UnsupportedError, match="its angle is not positions"):
        fuse_graph(changed(change))
