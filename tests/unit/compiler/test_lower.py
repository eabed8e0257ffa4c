"""Programs come from walking graphs: what is cut from a graph is gone from the program."""

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import pytest

from calstack.calbin.program import Attention, Embed, LmHead, NormLinear, QkNormRopeKv
from calstack.compiler.inventory import Class, take_inventory
from calstack.compiler.lower import Lowered, lower
from calstack.compiler.options import CompileOptions
from calstack.compiler.pipeline import fuse_graph, plan_bundle
from calstack.compiler.quantize.table import ParameterTable
from calstack.errors import UnsupportedError, UsageError
from calstack.specs import QuantSpec, Role, WeightFormat
from tests.support.onnx_edits import remove_layer
from tests.support.tiny import TINY, bundle, plan


def lowered(name: str, change: Callable[[ir.Graph], object] | None = None) -> Lowered:
    model = bundle(name).prefill.clone()
    if change is not None:
        change(model.graph)
    return lower(fuse_graph(model), ParameterTable(bundle(name).tensors, QuantSpec(), keep=True))


@pytest.mark.parametrize("name", TINY)
def test_calls_follow_the_graph_layer_by_layer(name: str) -> None:
    low, spec = lowered(name), bundle(name).spec
    layer = ["norm_linear", "qk_norm_rope_kv", "attention", "linear", "norm_linear", "linear"]
    assert [call.OP for call in low.calls] == ["embed", "rope_table", *layer * spec.layers, "lm_head"]
    assert [call.kv_layer for call in low.calls if isinstance(call, Attention)] == list(range(spec.layers))
    assert [call.layer for call in low.calls[2:-1]] == [n for n in range(spec.layers) for _ in layer]
    attention = next(call for call in low.calls if isinstance(call, Attention))
    assert (attention.heads, attention.kv_heads, attention.head_dim) == (spec.heads, spec.kv_heads, spec.head_dim)
    assert attention.scale == pytest.approx(spec.scale)


def test_head_norms_are_there_only_where_the_graph_has_them() -> None:
    for name in TINY:
        calls = [call for call in lowered(name).calls if isinstance(call, QkNormRopeKv)]
        assert all((call.q_norm is not None) == bundle(name).spec.qk_norm for call in calls)


def test_layer_removed_from_the_graph_is_gone_from_the_program() -> None:
    whole, cut = lowered("tiny-llama"), lowered("tiny-llama", lambda graph: remove_layer(graph, 0))
    assert len(cut.calls) == len(whole.calls) - 6
    assert cut.kv_inputs == whole.kv_inputs[1:]
    assert [call.kv_layer for call in cut.calls if isinstance(call, Attention)] == list(range(len(cut.kv_inputs)))
    first = next(call for call in cut.calls if isinstance(call, NormLinear))
    assert first.weight.tensor == "model.layers.1.self_attn.{q_proj,k_proj,v_proj}.weight"


def test_tied_embedding_is_one_tensor_and_an_untied_one_is_two() -> None:
    for name in TINY:
        low, spec = lowered(name), bundle(name).spec
        embed = next(call for call in low.calls if isinstance(call, Embed))
        head = next(call for call in low.calls if isinstance(call, LmHead))
        assert (embed.weight == head.weight) == spec.tied_embeddings


def test_same_weight_is_planned_once_for_all_submodels() -> None:
    names = [getattr(p, "weight", None) or getattr(p, "vector", None) for p in plan("tiny-llama").table.plans]
    tensors = [value.tensor for value in names if value is not None]
    assert len(set(tensors)) == len(tensors)


def stale_read(graph: ir.Graph) -> None:
    """The last residual sum reads the stream as it was one sum earlier."""
    adds = [node for node in graph if node.op_type == "Add"]
    adds[-1].replace_input_with(0, adds[-3].inputs[0])


def test_reading_the_stream_after_it_was_changed_in_place_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="changed it in place"):
        lowered("tiny-llama", stale_read)


def test_graphs_that_disagree_on_kv_layers_are_refused() -> None:
    import dataclasses

    decode = bundle("tiny-llama").decode.clone()
    remove_layer(decode.graph, 0)
    with pytest.raises(UnsupportedError, match="KV layers"):
        plan_bundle(
            dataclasses.replace(bundle("tiny-llama"), graphs={Role.PREFILL: bundle("tiny-llama").prefill, Role.DECODE: decode}),
            CompileOptions(),
        )


def test_submodels_are_a_prefill_and_per_batch_a_decode_and_an_extend() -> None:
    made = plan("tiny-llama", batches=(8, 1), context=256)
    assert [(d.submodel.role, d.submodel.batch, d.submodel.q_len, d.submodel.rows) for d in made.drafts] == [
        (Role.PREFILL, 8, 256, 256),
        (Role.DECODE, 1, 1, 1),
        (Role.DECODE, 8, 1, 8),
        (Role.EXTEND, 1, 8, 8),
        (Role.EXTEND, 8, 8, 64),
    ]
    assert made.drafts[0].submodel.key == "prefill.b8.q256.c256.paged"
    for draft in made.drafts:
        assert all(work.per_token > 0 for work in draft.submodel.workload)
        assert draft.program.context == 256


def test_workload_counts_the_products_of_the_model() -> None:
    made = plan("tiny-llama")
    spec = bundle("tiny-llama").spec
    layer = spec.hidden * spec.head_dim * 2 * (spec.heads + spec.kv_heads) + 3 * spec.hidden * spec.intermediate
    macs = made.drafts[-1].submodel.workload[0]
    assert macs.per_token == spec.layers * layer + spec.vocab * spec.hidden
    assert macs.per_past_token == spec.layers * 2 * spec.heads * spec.head_dim
    assert made.drafts[0].submodel.workload[0].constant == spec.vocab * spec.hidden


@pytest.mark.parametrize(
    "options", [{"batches": ()}, {"batches": (0,)}, {"batches": (4, 4)}, {"context": 32}, {"context": 1 << 20}, {"prefill_rows": 1 << 20}]
)
def test_options_out_of_range_are_usage_errors(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        plan("tiny-llama", **options)


def test_unknown_target_is_named_with_those_there_are() -> None:
    with pytest.raises(UsageError, match="cpu"):
        plan("tiny-llama", target="tpu")


def test_overrides_reach_single_tensors() -> None:
    quant = QuantSpec(default=WeightFormat.W8A8, overrides=(("*.down_proj.weight", WeightFormat.F32),))
    formats = {row.tensor: row.format for row in plan("tiny-llama", quant=quant).table.quant()}
    assert formats["model.layers.0.mlp.down_proj.weight"] is WeightFormat.F32
    assert formats["model.layers.0.mlp.up_proj.weight"] is WeightFormat.W8A8


def test_inventory_sorts_every_operator() -> None:
    rows = take_inventory([bundle("tiny-qwen3").prefill])
    kinds = {row.op: row.kind for row in rows}
    assert kinds["MatMul"] is Class.NATIVE
    assert kinds["RotaryEmbedding"] is Class.FUSE
    assert sum(row.count for row in rows) == len(list(bundle("tiny-qwen3").prefill.graph))
    assert [row.kind for row in rows] == sorted((row.kind for row in rows), key=list(Class).index)


@pytest.mark.parametrize(("op", "domain", "said"), [("Einsum", "", "Einsum x1"), ("MoE", "other", "other::MoE"), ("Softmax", "", "host")])
def test_operator_without_a_place_ends_the_compile_by_name(op: str, domain: str, said: str) -> None:
    model = bundle("tiny-llama").prefill.clone()
    model.graph.append(ir.node(op, [model.graph.outputs[0]], domain=domain, name="stranger"))
    with pytest.raises(UnsupportedError, match=f"{said}.*stranger"):
        take_inventory([model])
