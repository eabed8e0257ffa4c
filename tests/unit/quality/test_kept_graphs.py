"""`compile SOURCE --keep-onnx D`, then `compile D`: the graphs are the interface."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from calstack import api
from calstack.calbin.program import Attention
from calstack.calbin.reader import Calbin, open_calbin
from tests.support.onnx_edits import change_weight, edit, remove_layer
from tests.support.tiny import DATA

pytestmark = pytest.mark.native

DOWN = "model.layers.1.mlp.down_proj.weight"


def compiled(source: Path, out: Path, kept: Path | None = None) -> Calbin:
    options = api.CompileOptions(batches=(1,), context=128, quality=False, keep_onnx=kept)
    return open_calbin(api.compile_model(source, out, options=options))


@pytest.fixture
def first(tmp_path: Path) -> Calbin:
    """Compiled from a source that is then deleted; its graphs are kept beside it."""
    source = tmp_path / "source"
    shutil.copytree(DATA / "tiny-llama", source)
    made = compiled(source, tmp_path / "first", tmp_path / "kept")
    shutil.rmtree(source)
    return made


def parameters(calbin: Calbin) -> dict[str, bytes]:
    return {t.name: calbin.shard(0).tensor(t.name, t.bytes).tobytes() for t in calbin.manifest.tensors}


def test_kept_graphs_give_the_same_programs_and_parameters_without_the_source(first: Calbin, tmp_path: Path) -> None:
    second = compiled(tmp_path / "kept", tmp_path / "second")
    for path in (p for p in first.path.rglob("*") if p.is_file() and p.parent.name in {"programs", "params"}):
        assert (second.path / path.relative_to(first.path)).read_bytes() == path.read_bytes()
    assert second.manifest.quant == first.manifest.quant


def test_removed_layer_is_gone_from_programs_parameters_and_kv(first: Calbin, tmp_path: Path) -> None:
    edit(tmp_path / "kept", lambda graph: remove_layer(graph, 1))
    second = compiled(tmp_path / "kept", tmp_path / "second")
    layers = first.manifest.kv.layers
    assert second.manifest.kv.layers == second.manifest.model.layers == layers - 1
    for submodel in second.manifest.submodels:
        calls = second.program(submodel.key).streams[0]
        assert sum(isinstance(call, Attention) for call in calls) == layers - 1
    assert parameters(first).keys() - parameters(second).keys() == {n for n in parameters(first) if ".layers.1." in n}
    assert api.verify(second.path).good


def test_changed_weight_shows_in_its_tensor_and_nowhere_else(first: Calbin, tmp_path: Path) -> None:
    change_weight(tmp_path / "kept", DOWN)
    second = compiled(tmp_path / "kept", tmp_path / "second")
    before, after = parameters(first), parameters(second)
    assert {name for name in before if before[name] != after[name]} == {DOWN}
    changed = np.frombuffer(before[DOWN], np.uint8) != np.frombuffer(after[DOWN], np.uint8)
    assert 0 < changed.sum() <= 32 + 2 + 16  # one group of one output: its codes and scale
    assert {row.format for row in second.manifest.quant} == {row.format for row in first.manifest.quant}
    assert api.verify(second.path).good


def test_one_graph_changed_alone_is_refused(first: Calbin, tmp_path: Path) -> None:
    from calstack.errors import CalstackError

    edit(tmp_path / "kept", lambda graph: remove_layer(graph, 1), ("decode.onnx",))
    with pytest.raises(CalstackError) as caught:
        compiled(tmp_path / "kept", tmp_path / "second")
    assert caught.value.exit_code in {2, 3}
    assert not (tmp_path / "second").exists()
