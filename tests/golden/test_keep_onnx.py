"""The graphs are the interface: compiling what `--keep-onnx` wrote gives the same bytes, and what is changed there shows."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest

from calstack.api import CompileOptions, compile_model
from calstack.specs import QuantSpec, WeightFormat
from tests.support.gguf_files import DATA, write_tiny_gguf
from tests.support.onnx_edits import change_weight, edit, remove_layer

pytestmark = pytest.mark.native  # goldens hold a digest of the scalar reference

OPTIONS = CompileOptions(quality=False, batches=(1,), context=512)


def with_options(**changed: Any) -> CompileOptions:
    return dataclasses.replace(OPTIONS, **changed)


def compiled(source: Path, out: Path, options: CompileOptions = OPTIONS) -> Path:
    return compile_model(source, out, options=options)


def contents(calbin: Path, *rooms: str) -> dict[str, bytes]:
    return {str(file.relative_to(calbin)): file.read_bytes() for room in rooms for file in sorted((calbin / room).iterdir())}


@pytest.mark.parametrize(
    ("model", "kind"),
    [("tiny-llama", "Q4_0"), ("tiny-llama", "Q4_1"), ("tiny-qwen3", "Q4_1"), ("tiny-qwen3", "Q8_0"), ("tiny-llama", "F16")],
)
def test_compiling_the_kept_graphs_gives_the_same_bytes_without_the_source(tmp_path: Path, model: str, kind: str) -> None:
    source = write_tiny_gguf(tmp_path / "m.gguf", model, kind)
    first = compiled(source, tmp_path / "a.calbin", with_options(keep_onnx=tmp_path / "D"))
    source.unlink()
    second = compiled(tmp_path / "D", tmp_path / "b.calbin")
    assert contents(first, "programs", "params", "golden") == contents(second, "programs", "params", "golden")
    for file in ("tokenizer.json", "chat_template.jinja", "generation.json"):
        assert (first / file).read_bytes() == (second / file).read_bytes()


@pytest.mark.parametrize("default", [WeightFormat.W8A8, WeightFormat.W4A8, WeightFormat.F32])
def test_an_hf_source_quantised_by_us_gives_the_same_bytes(tmp_path: Path, default: WeightFormat) -> None:
    options = with_options(quant=QuantSpec(default=default), keep_onnx=tmp_path / "D")
    first = compiled(DATA / "tiny-llama", tmp_path / "a.calbin", options)
    second = compiled(tmp_path / "D", tmp_path / "b.calbin", with_options(quant=QuantSpec(default=default)))
    assert contents(first, "programs", "params") == contents(second, "programs", "params")


@pytest.fixture
def kept(tmp_path: Path) -> tuple[Path, Path]:
    source = write_tiny_gguf(tmp_path / "m.gguf", "tiny-llama", "Q4_1")
    calbin = compiled(source, tmp_path / "a.calbin", with_options(keep_onnx=tmp_path / "D"))
    return calbin, tmp_path / "D"


def test_a_layer_removed_from_the_graphs_is_missing_in_the_calbin(tmp_path: Path, kept: tuple[Path, Path]) -> None:
    calbin, directory = kept
    edit(directory, lambda graph: remove_layer(graph, 1))
    shorter = compiled(directory, tmp_path / "b.calbin")
    count = {path: msgspec.json.decode((path / "manifest.json").read_bytes())["model"]["layers"] for path in (calbin, shorter)}
    assert count == {calbin: 3, shorter: 2}
    attention = {path: sum(b.count(b'"attention"') for b in contents(path, "programs").values()) for path in (calbin, shorter)}
    assert attention[shorter] * 3 == attention[calbin] * 2 > 0
    assert contents(calbin, "golden") != contents(shorter, "golden")


def test_a_weight_changed_in_the_graphs_changes_the_parameters(tmp_path: Path, kept: tuple[Path, Path]) -> None:
    calbin, directory = kept
    change_weight(directory, "model.layers.1.mlp.down_proj.weight", add=1.0)
    changed = compiled(directory, tmp_path / "b.calbin")
    assert contents(calbin, "params") != contents(changed, "params")
    assert contents(calbin, "golden") != contents(changed, "golden")
