"""Plans before a compile: bytes that the artifact then has, limits with what would fit, a geometry of which there is only a config."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from calstack import api
from calstack.calbin.reader import open_calbin
from calstack.cli import main
from calstack.devices.base import OpenOptions
from calstack.devices.registry import open_device
from calstack.errors import ArtifactError, SourceError, UnsupportedError, UsageError
from calstack.plan import PlanReport
from calstack.specs import QuantSpec, WeightFormat, parse_quant
from calstack.targets.spec import load_target
from tests.support.tiny import DATA

CONFIG = DATA / "configs" / "qwen3-30b-a3b.json"


def options(target: str, quant: QuantSpec | None = None) -> api.CompileOptions:
    return api.CompileOptions(target=target, quant=quant or QuantSpec(), quality=False)


@pytest.mark.parametrize("target", ["cpu", "calculet-1", "calculet-2"])
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen3", "tiny-qwen3-moe"])
@pytest.mark.native
def test_the_artifact_has_the_planned_bytes(tmp_path: Path, model: str, target: str) -> None:
    chosen = options(target, QuantSpec(default=WeightFormat.W8A8))
    planned = api.plan_model(DATA / model, options=chosen)
    path = api.compile_model(DATA / model, tmp_path / "m.calbin", options=chosen)
    chips = open_calbin(path).manifest.target.chips
    assert [c.params_bytes for c in planned.chips] == [c.params_bytes for c in chips]
    assert [c.kv_bytes_per_token * 64 for c in planned.chips] == [c.kv_bytes_per_block for c in chips]
    assert [c.activation_bytes for c in planned.chips] == [c.activation_bytes for c in chips]
    headers = [(path / c.params).stat().st_size - c.params_bytes for c in chips]
    assert all(0 < header < 1 << 20 for header in headers)
    assert api.verify(path).good


def moe_plan(target: str, contexts: tuple[int, ...] = (4096, 40_960)) -> PlanReport:
    recipe = load_target(target).recipe
    assert recipe is not None
    chosen = api.CompileOptions(target=target, quant=parse_quant(recipe.quant), context=contexts[-1])
    return api.plan_model(CONFIG, options=chosen, contexts=contexts, quant=recipe.quant)


def test_the_boards_model_takes_what_its_owners_saw() -> None:
    plan = moe_plan("calculet-2")
    assert plan.chips[0].params_bytes == pytest.approx(9.40e9, rel=0.01)
    assert plan.chips[1].params_bytes == pytest.approx(8.78e9, rel=0.01)
    assert plan.kv_bytes_per_token == 98_304 == sum(chip.kv_bytes_per_token for chip in plan.chips)
    assert plan.fits
    known = {s.phase: s for s in plan.speeds if s.board_tok_s}
    assert {phase: s.board_tok_s for phase, s in known.items()} == {"prefill": 184.27, "decode": 58.25}
    assert all(s.tok_s == pytest.approx(s.board_tok_s, rel=0.1) for s in known.values())
    assert any(figure.startswith("read_gb_s") and "fitted" in figure for figure in plan.fitted)


def test_what_does_not_fit_is_said_with_what_would() -> None:
    plan = moe_plan("calculet-1")
    assert not plan.fits
    assert "would fit" in plan.limits[0]


def test_every_batch_and_context_is_held_against_the_room_of_the_fullest_chip() -> None:
    plan = moe_plan("calculet-2")
    buckets = {(b.context, b.batch): b for b in plan.buckets}
    assert len(buckets) == 2 * len(plan.batches)
    left = min(chip.kv_blocks_left for chip in plan.chips)
    spec = load_target("calculet-2").chips[0]
    chip = plan.chips[0]
    assert spec.reserved_bytes > 0
    assert chip.kv_blocks_left * 64 * chip.kv_bytes_per_token <= chip.dram_bytes - spec.reserved_bytes - chip.params_bytes
    for (context, batch), bucket in buckets.items():
        assert bucket.kv_bytes == batch * context * plan.kv_bytes_per_token
        assert bucket.lanes_fit == left // (context // 64)
        assert bucket.fits == (batch <= bucket.lanes_fit)
    assert buckets[4096, 16].fits
    assert not buckets[40_960, 16].fits
    assert buckets[40_960, 1].tok_s < buckets[4096, 1].tok_s


def test_every_call_has_a_tile_and_one_that_exceeds_the_sram_is_a_limit(tmp_path: Path) -> None:
    small = tmp_path / "small.toml"
    import msgspec

    spec = load_target("calculet-1")
    chips = tuple(msgspec.structs.replace(chip, sram_bytes=20_000) for chip in spec.chips)
    small.write_bytes(msgspec.toml.encode(msgspec.structs.replace(spec, chips=chips)))
    chosen = options(str(small), QuantSpec(default=WeightFormat.W8A8))
    plan = api.plan_model(DATA / "tiny-llama", options=chosen)
    assert {tile.op for tile in plan.chips[0].tiles} >= {"embed", "norm_linear", "attention", "linear", "lm_head"}
    assert not plan.fits
    assert "rows at once would fit" in plan.limits[0]
    assert api.plan_model(DATA / "tiny-llama", options=options("calculet-1", chosen.quant)).fits


@pytest.mark.native
def test_a_measured_target_is_a_file_that_plans_and_says_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["targets", "--measure"]) == 0
    path = tmp_path / "here.toml"
    path.write_text(capsys.readouterr().out)
    spec = load_target(str(path))
    assert {name for name in spec.speeds.__struct_fields__ if getattr(spec.speeds, name).origin == "measured"} == {
        "read_gb_s",
        "int8_gop_s",
        "call_us",
    }
    plan = api.plan_model(DATA / "tiny-llama", options=options(str(path), QuantSpec(default=WeightFormat.W8A8)))
    assert all(speed.tok_s > 0 for speed in plan.speeds)


def test_a_hopeless_model_is_refused_by_its_config_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(CONFIG.read_text()) | {"num_hidden_layers": 400}))
    monkeypatch.setattr("calstack.frontends.open_source", lambda *_: pytest.fail("its graphs were built"))
    with pytest.raises(UnsupportedError, match=r"alone take .* GB or more.*would fit"):
        api.plan_model(path, options=options("calculet-2", parse_quant(load_target("calculet-2").recipe.quant)))  # type: ignore[union-attr]


def test_an_encoder_is_planned_without_a_cache() -> None:
    plan = api.plan_model(DATA / "tiny-bert", options=options("cpu"))
    assert [s.phase for s in plan.speeds] == ["encode"]
    assert plan.kv_bytes_per_token == 0
    assert not plan.buckets


def test_a_context_beyond_the_model_is_refused() -> None:
    with pytest.raises(UsageError, match="40960 positions"):
        moe_plan("calculet-2", contexts=(50_000,))


@pytest.mark.native
def test_a_config_alone_compiles_to_programs_that_no_device_runs(tmp_path: Path) -> None:
    path = api.compile_model(CONFIG, tmp_path / "m.calbin", options=options("calculet-2", QuantSpec(default=WeightFormat.W8A8)))
    calbin = open_calbin(path)
    assert calbin.manifest.weightless
    assert not (path / "params").exists()
    assert len(calbin.program(calbin.manifest.submodels[0].key).streams) == 2
    device = open_device("cpu", OpenOptions())
    with pytest.raises(ArtifactError, match="weightless"):
        device.load(path, kv_blocks=1)
    device.close()
    with pytest.raises(ArtifactError, match="weightless"):
        api.load(path)


def test_weights_of_a_config_alone_are_refused_by_name(tmp_path: Path) -> None:
    from calstack.frontends import open_source

    tensor = next(iter(open_source(CONFIG).tensors.values()))
    with pytest.raises(UnsupportedError, match="no weights"):
        tensor.float32()


@pytest.mark.parametrize("change", [{"num_experts": -1}, {"hidden_size": 10**12}, {"model_type": "nothing"}, {"torch_dtype": "int3"}])
def test_a_damaged_config_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(CONFIG.read_text()) | change))
    with pytest.raises((SourceError, UnsupportedError)):
        api.plan_model(path)


def test_an_inventory_names_classes_and_unsupported_operators(tmp_path: Path) -> None:
    import onnx
    from onnx import helper

    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="a"), helper.make_node("Erf", ["y"], ["z"], name="b")],
        "g",
        [helper.make_tensor_value_info("x", 1, ["rows", 4]), helper.make_tensor_value_info("w", 1, [4, 8])],
        [helper.make_tensor_value_info("z", 1, ["rows", 8])],
    )
    onnx.save(helper.make_model(graph), tmp_path / "any.onnx")
    rows = {row.op: row for row in api.inventory(tmp_path / "any.onnx")}
    assert rows["MatMul"].kind == "native"
    assert rows["MatMul"].share == 1.0
    assert rows["Erf"].kind == "unsupported"
    assert rows["Erf"].example == "b"
    assert "fusion rule" in rows["Erf"].note
    (tmp_path / "bad.onnx").write_bytes(b"\xff" * 40)
    with pytest.raises(SourceError, match="no ONNX file"):
        api.inventory(tmp_path / "bad.onnx")


def test_passes_say_what_they_did_and_why_rules_did_not_match() -> None:
    text = api.explain_passes(DATA / "tiny-llama")
    assert "fuse/linear: changed the graph" in text
    assert "fuse/moe: no match" in text
    assert " x " in text
    dumped = api.explain_passes(DATA / "tiny-llama", dump_after="fuse/linear")
    assert "Linear(" in dumped
    assert "RMSNormalization(" in dumped
    with pytest.raises(UsageError, match="fuse/linear"):
        api.explain_passes(DATA / "tiny-llama", dump_after="fuse/nothing")
