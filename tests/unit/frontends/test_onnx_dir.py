from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from calstack.errors import CalstackError, SourceError, UsageError
from calstack.frontends import open_source
from calstack.frontends.onnx_dir import keep_onnx
from calstack.graph.evaluate import Oracle
from calstack.graph.model import GraphBundle
from tests.support.gguf_files import DATA, write_tiny_gguf
from tests.support.onnx_edits import change_weight, edit, remove_layer

UP = "model.layers.1.mlp.up_proj.weight"
IDS = list(range(10, 40))


@pytest.fixture
def source(tmp_path: Path) -> GraphBundle:
    return open_source(write_tiny_gguf(tmp_path / "m.gguf", kind="Q4_1"))


@pytest.fixture
def kept(tmp_path: Path, source: GraphBundle) -> Path:
    keep_onnx(source, tmp_path / "kept")
    return tmp_path / "kept"


def same_graph(one: ir.Model, other: ir.Model) -> None:
    assert [str(node) for node in one.graph] == [str(node) for node in other.graph]
    assert list(one.graph.initializers) == list(other.graph.initializers)
    for name, value in one.graph.initializers.items():
        data = other.graph.initializers[name].const_value
        assert value.const_value is not None
        assert data is not None
        assert np.array_equal(value.const_value.numpy(), data.numpy())


@pytest.mark.parametrize("origin", ["gguf", "tiny-llama", "tiny-qwen3"])
def test_what_is_read_is_what_was_written(tmp_path: Path, origin: str) -> None:
    source = open_source(write_tiny_gguf(tmp_path / "m.gguf") if origin == "gguf" else DATA / origin)
    keep_onnx(source, tmp_path / "kept")
    read = open_source(tmp_path / "kept")
    same_graph(source.prefill, read.prefill)
    same_graph(source.decode, read.decode)
    assert list(read.tensors) == list(source.tensors)
    for name, tensor in source.tensors.items():
        assert (read.tensors[name].kind, read.tensors[name].shape) == (tensor.kind, tensor.shape)
        assert np.array_equal(read.tensors[name].stored(), tensor.stored())
    assert (read.spec, read.tokenizer_json, read.chat_template) == (source.spec, source.tokenizer_json, source.chat_template)
    assert read.generation == source.generation


def test_the_directory_works_after_the_source_is_gone(tmp_path: Path, kept: Path, source: GraphBundle) -> None:
    want = Oracle(source).logits(IDS)
    (tmp_path / "m.gguf").unlink()
    shutil.move(kept, tmp_path / "elsewhere")
    assert np.array_equal(Oracle(open_source(tmp_path / "elsewhere")).logits(IDS), want)


@pytest.mark.parametrize("name", ["prefill.onnx", "decode.onnx"])
def test_onnxruntime_loads_the_files_as_they_are(kept: Path, name: str) -> None:
    inputs = {value.name for value in ort.InferenceSession(kept / name).get_inputs()}
    assert {"input_ids", "positions", "kv.2.v"} <= inputs


def test_a_changed_weight_comes_as_its_new_floats(kept: Path, source: GraphBundle, caplog: pytest.LogCaptureFixture) -> None:
    change_weight(kept, UP)
    with caplog.at_level(logging.WARNING):
        read = open_source(kept)
    assert UP in caplog.text
    want = source.tensors[UP].float32()
    want.reshape(-1)[3] += np.float32(0.25)
    assert read.tensors[UP].kind == "F32"
    assert np.array_equal(read.tensors[UP].float32(), want)
    others = {name: tensor.kind for name, tensor in read.tensors.items() if name != UP}
    assert others == {name: tensor.kind for name, tensor in source.tensors.items() if name != UP}
    assert "weights.bin" in {file.name for file in read.source.files}


def test_a_weight_moved_into_the_graphs_is_taken_from_there(kept: Path) -> None:
    def inline(graph: ir.Graph) -> None:
        graph.initializers[UP].const_value = ir.tensor(np.full((160, 64), 0.5, np.float32), name=UP)

    edit(kept, inline)
    assert (open_source(kept).tensors[UP].float32() == 0.5).all()


def test_a_weight_changed_in_one_graph_only_is_refused(kept: Path) -> None:
    def inline(graph: ir.Graph) -> None:
        graph.initializers[UP].const_value = ir.tensor(np.full((160, 64), 0.5, np.float32), name=UP)

    edit(kept, inline, ("decode.onnx",))
    with pytest.raises(SourceError, match=r"up_proj.*different data"):
        open_source(kept)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_layer_removed_from_both_graphs_is_gone(kept: Path, source: GraphBundle, layer: int) -> None:
    edit(kept, lambda graph: remove_layer(graph, layer))
    read = open_source(kept)
    assert read.spec.layers == 2
    assert set(source.tensors) - set(read.tensors) == {name for name in source.tensors if name.startswith(f"model.layers.{layer}.")}
    moved = np.abs(Oracle(read).logits(IDS) - Oracle(source).logits(IDS)).max()
    assert moved > 0.1


def test_a_layer_removed_from_one_graph_only_is_refused(kept: Path) -> None:
    edit(kept, lambda graph: remove_layer(graph, 1), ("prefill.onnx",))
    with pytest.raises(SourceError, match="different layers"):
        open_source(kept)


@pytest.mark.parametrize("location", ["../m.gguf", "/etc/passwd", "a/../../m.gguf"])
def test_data_outside_the_directory_is_refused(kept: Path, location: str) -> None:
    def lead_out(graph: ir.Graph) -> None:
        old = graph.initializers[UP].const_value
        assert isinstance(old, ir.ExternalTensor)
        graph.initializers[UP].const_value = ir.ExternalTensor(
            location, 0, old.nbytes, ir.DataType.FLOAT, shape=old.shape, name=UP, base_dir=""
        )

    edit(kept, lead_out)
    with pytest.raises(SourceError, match=r"up_proj.*outside"):
        open_source(kept)


def test_a_link_that_leads_out_is_refused(tmp_path: Path, kept: Path) -> None:
    shutil.move(kept / "weights.bin", tmp_path / "outside.bin")
    (kept / "weights.bin").symlink_to(tmp_path / "outside.bin")
    with pytest.raises(SourceError, match="outside"):
        open_source(kept)


@pytest.mark.parametrize("file", ["prefill.onnx", "decode.onnx", "index.json", "weights.bin", "stored.bin", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "garbage"])
def test_a_damaged_file_ends_in_one_line(kept: Path, file: str, damage: str) -> None:
    path = kept / file
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"empty": b"", "cut": data[: len(data) // 2], "garbage": b"\xff\x00garbage" * 9}[damage])
    with pytest.raises(CalstackError) as caught:
        open_source(kept)
    assert str(kept) in caught.value.line()
    assert "\n" not in caught.value.line()


@pytest.mark.parametrize(
    ("field", "value"),
    [("kind", "Q9_9"), ("stored_offset", 1 << 60), ("stored_offset", -7), ("stored_bytes", 3), ("kind", "Q8_0"), ("shape", [7])],
)
def test_a_wrong_index_entry_never_reads_wrong_bytes(kept: Path, field: str, value: object) -> None:
    index = json.loads((kept / "index.json").read_text())
    index["tensors"][UP][field] = value
    (kept / "index.json").write_text(json.dumps(index))
    if field == "shape":  # does not describe the graph's weight any more: as if it were changed
        assert open_source(kept).tensors[UP].kind == "F32"
        return
    with pytest.raises(SourceError, match="up_proj"):
        open_source(kept)


def test_another_format_version_is_refused(kept: Path) -> None:
    index = json.loads((kept / "index.json").read_text())
    (kept / "index.json").write_text(json.dumps(index | {"format": 2}))
    with pytest.raises(SourceError, match="format 2"):
        open_source(kept)


def test_a_directory_with_other_files_is_not_written_over(tmp_path: Path, source: GraphBundle) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"notes\.txt|m\.gguf"):
        keep_onnx(source, tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_writing_again_replaces_what_was_written(kept: Path) -> None:
    read = open_source(kept)
    keep_onnx(read, kept)
    assert np.array_equal(open_source(kept).tensors[UP].stored(), read.tensors[UP].stored())
    assert [path.name for path in kept.parent.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("model", ["tiny-mistral", "tiny-phi3", "tiny-gemma3", "tiny-qwen3-moe", "tiny-mixtral"])
def test_every_form_of_graph_survives_the_directory(tmp_path: Path, model: str) -> None:
    source = open_source(DATA / model)
    keep_onnx(source, tmp_path / "D")
    read = open_source(tmp_path / "D")
    assert read.spec == source.spec
    assert {name: (t.kind, t.shape) for name, t in read.tensors.items()} == {n: (t.kind, t.shape) for n, t in source.tensors.items()}
    ids = list(range(4, 60))
    np.testing.assert_array_equal(Oracle(read).logits(ids, chunk=20), Oracle(source).logits(ids, chunk=20))
