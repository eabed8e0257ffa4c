from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calstack.errors import SourceError, UnsupportedError
from calstack.frontends import open_source
from calstack.frontends.arch.rope import llama3_factors
from calstack.frontends.gguf import read_gguf
from calstack.graph.names import KIND_KEY
from calstack.specs import RopeSpec
from tests.support.gguf_files import DATA, gguf_bytes, interleave, quantise, tiny_parts, write_tiny_gguf

Q = "model.layers.1.self_attn.q_proj.weight"


def written(path: Path, **changes: Any) -> Path:
    """A tiny llama file with tensors changed: name=None removes, name=(kind, shape, bytes) replaces."""
    metadata, tensors = tiny_parts("tiny-llama", "F32")
    for name, tensor in changes.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    path.write_bytes(gguf_bytes(metadata, tensors))
    return path


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_every_kind_is_read_with_its_stored_bytes(tmp_path: Path, kind: str) -> None:
    bundle = open_source(write_tiny_gguf(tmp_path / "m.gguf", "tiny-qwen3", kind))
    tensor = bundle.tensors[Q]
    original = open_source(DATA / "tiny-qwen3").tensors[Q].float32()
    assert (tensor.kind, tensor.shape) == (kind, (128, 64))
    assert tensor.stored().tobytes() == quantise(kind, original)
    assert bundle.prefill.graph.initializers[Q].metadata_props[KIND_KEY] == kind
    step = {"F32": 0.0, "F16": 1e-3, "BF16": 8e-3, "Q8_0": 8e-3}.get(kind, 0.15)
    assert np.abs(tensor.float32() - original).max() <= step * np.abs(original).max()


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_1"])
def test_interleaved_rows_of_llama_come_out_in_halves_order(tmp_path: Path, kind: str) -> None:
    halves = open_source(DATA / "tiny-llama").tensors[Q].float32()
    tensor = open_source(write_tiny_gguf(tmp_path / "m.gguf", "tiny-llama", kind)).tensors[Q]
    rows = np.frombuffer(quantise(kind, interleave(halves, 4)), np.uint8).reshape(64, -1)
    assert not np.array_equal(tensor.stored(), rows)
    assert np.array_equal(interleave(tensor.stored(), 4), rows)


def test_the_spec_is_that_of_the_hf_directory(tmp_path: Path) -> None:
    for model in ("tiny-llama", "tiny-qwen3"):
        want, got = open_source(DATA / model), open_source(write_tiny_gguf(tmp_path / "m.gguf", model))
        assert got.spec.norm_eps == pytest.approx(want.spec.norm_eps)
        fields = set(want.spec.__struct_fields__) - {"norm_eps", "rope"}
        assert {f: getattr(got.spec, f) for f in fields} == {f: getattr(want.spec, f) for f in fields}
        assert got.chat_template == want.chat_template
        assert got.source.licence == "apache-2.0"


def test_opening_reads_no_weights(tmp_path: Path) -> None:
    bundle = open_source(write_tiny_gguf(tmp_path / "m.gguf"))
    assert not bundle.tensors["model.embed_tokens.weight"].stored().flags.writeable  # a view of the map


@pytest.mark.parametrize(
    ("changed", "scaling", "factor"),
    [
        ({"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0}, "linear", 4.0),
        ({"llama__rope__scale_linear": 2.0}, "linear", 2.0),
        (
            {
                "llama__rope__scaling__type": "yarn",
                "llama__rope__scaling__factor": 4.0,
                "llama__rope__scaling__original_context_length": 512,
            },
            "yarn",
            4.0,
        ),
    ],
)
def test_rope_scaling_is_read(tmp_path: Path, changed: dict[str, Any], scaling: str, factor: float) -> None:

    rope = open_source(write_tiny_gguf(tmp_path / "m.gguf", **changed)).spec.rope
    assert (rope.scaling, rope.factor) == (scaling, factor)
    assert rope.attention_factor == pytest.approx(0.1 * math.log(4) + 1 if scaling == "yarn" else 1.0)


def test_llama3_scaling_is_found_from_its_factors(tmp_path: Path) -> None:
    rope = RopeSpec(theta=10000.0, dim=16, scaling="llama3", factor=8.0, original_context=8192)
    factors = llama3_factors(rope).astype(np.float32)
    path = written(tmp_path / "m.gguf", **{"rope_freqs.weight": ("F32", (8,), factors.tobytes())})
    assert open_source(path).spec.rope == rope
    path = written(tmp_path / "n.gguf", **{"rope_freqs.weight": ("F32", (8,), (factors * factors).tobytes())})
    with pytest.raises(UnsupportedError, match="rope_freqs"):
        open_source(path)


@pytest.mark.parametrize("cut", [0, 3, 4, 8, 23, 24, 40, 200, 3000, 9000, -1])
def test_a_truncated_file_is_refused_in_one_line(tmp_path: Path, cut: int) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(SourceError) as caught:
        open_source(path)
    assert str(path) in caught.value.line()
    assert "\n" not in caught.value.line()
    assert caught.value.remedy


def test_bytes_after_the_last_tensor_are_refused(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes() + bytes(4096))
    with pytest.raises(SourceError, match="oversized"):
        open_source(path)


@pytest.mark.parametrize(
    ("at", "layout", "number", "message"),
    [
        (0, "<4s", b"GGML", "magic"),
        (8, "<Q", 1 << 62, "tensor count"),
        (16, "<Q", (1 << 64) - 1, "metadata count"),
        (24, "<Q", 1 << 63, "metadata key 0"),
    ],
)
def test_a_hostile_header_is_refused(tmp_path: Path, at: int, layout: str, number: object, message: str) -> None:
    data = bytearray(write_tiny_gguf(tmp_path / "m.gguf").read_bytes())
    struct.pack_into(layout, data, at, number)
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(SourceError, match=message):
        open_source(tmp_path / "m.gguf")


@pytest.mark.parametrize("version", [1, 4, 0x03000000])
def test_other_versions_are_unsupported(tmp_path: Path, version: int) -> None:
    data = bytearray(write_tiny_gguf(tmp_path / "m.gguf").read_bytes())
    struct.pack_into("<I", data, 4, version)
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(UnsupportedError, match="version"):
        open_source(tmp_path / "m.gguf")


def one_tensor(path: Path, *, dims: tuple[int, ...] = (32,), code: int = 0, offset: int = 0, data: bytes = bytes(128)) -> Path:
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q", 1) + b"t" + struct.pack("<I", len(dims))
    head += struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", code, offset)
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return path


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ({"dims": (1 << 32, 1 << 32)}, "reach past the end"),
        ({"dims": (1 << 63, 2, 1, 1)}, "reach past the end"),
        ({"dims": (0,)}, "a dimension is 0"),
        ({"dims": ()}, "0 dimensions"),
        ({"dims": (1,) * 5}, "5 dimensions"),
        ({"dims": (33,), "code": 8}, "whole Q8_0 blocks"),
        ({"offset": 16}, "not a multiple"),
        ({"offset": 1 << 63}, "reach past the end"),
        ({"code": 999}, "unknown tensor type 999"),
        ({"data": bytes(96)}, "reach past the end"),
    ],
)
def test_a_hostile_tensor_is_refused_by_name(tmp_path: Path, tensor: dict[str, Any], message: str) -> None:
    with pytest.raises(SourceError, match=message) as caught:
        read_gguf(one_tensor(tmp_path / "m.gguf", **tensor))
    assert "tensor" in caught.value.where


def test_an_unsupported_tensor_type_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"tensor 't'.*Q3_K"):
        read_gguf(one_tensor(tmp_path / "m.gguf", dims=(256,), code=11))


def test_overlapping_tensors_are_refused(tmp_path: Path) -> None:
    data = bytearray(gguf_bytes({}, {"a": ("F32", (8,), bytes(32)), "b": ("F32", (8,), bytes(32))}))
    at = data.rindex(struct.pack("<Q", 32), 0, 200)
    struct.pack_into("<Q", data, at, 0)
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(SourceError, match="overlap"):
        read_gguf(tmp_path / "m.gguf")


def test_a_repeated_metadata_key_is_refused(tmp_path: Path) -> None:
    data = gguf_bytes({"aaaa": 1, "aaab": 2}, {}).replace(b"aaab", b"aaaa")
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(SourceError, match="aaaa: the key appears twice"):
        read_gguf(tmp_path / "m.gguf")


@pytest.mark.parametrize("alignment", [0, 3, 1 << 30])
def test_a_bad_alignment_is_refused(tmp_path: Path, alignment: int) -> None:
    with pytest.raises(SourceError, match="alignment"):
        read_gguf(_write(tmp_path, gguf_bytes({"general.alignment": alignment}, {})))


def test_another_alignment_is_followed(tmp_path: Path) -> None:
    tensors = {"a": ("F32", (8,), bytes(32)), "b": ("F32", (1,), b"\x00\x00\x80\x3f")}
    file = read_gguf(_write(tmp_path, gguf_bytes({"general.alignment": 64}, tensors, alignment=64)))
    assert file.tensors["b"].offset == 64 + file.tensors["a"].offset


def _write(directory: Path, data: bytes) -> Path:
    (directory / "m.gguf").write_bytes(data)
    return directory / "m.gguf"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"llama__block_count": None}, "llama.block_count: the key is missing"),
        ({"llama__block_count": 4}, "4 layers are promised, the weights hold 3"),
        ({"llama__block_count": 1 << 31}, "not an integer from 1 to 1024"),
        ({"llama__block_count": "3"}, "'3' is not an integer"),
        ({"llama__embedding_length": 32}, "expected"),
        ({"llama__attention__head_count_kv": 3}, "not a multiple of 3"),
        ({"llama__attention__layer_norm_rms_epsilon": float("nan")}, "nan is not a number"),
        ({"llama__rope__freq_base": float("inf")}, "inf is not a number"),
        ({"llama__attention__head_count": 0}, "not an integer"),
        ({"tokenizer__ggml__eos_token_id": 320}, "eos_token_id"),
    ],
)
def test_wrong_metadata_is_refused_by_key(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    changed = {key.replace("__", "."): item for key, item in changed.items()}
    with pytest.raises(SourceError, match=message):
        open_source(write_tiny_gguf(tmp_path / "m.gguf", **changed))


def test_an_unknown_architecture_is_unsupported(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"general.architecture.*'mamba'"):
        open_source(write_tiny_gguf(tmp_path / "m.gguf", **{"general.architecture": "mamba"}))


def test_one_part_of_a_split_model_is_unsupported(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"split\.count.*merge"):
        open_source(write_tiny_gguf(tmp_path / "m.gguf", split__count=2))


def test_a_missing_tensor_is_named_as_in_the_file(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"blk\.1\.ffn_up\.weight.*missing"):
        open_source(written(tmp_path / "m.gguf", **{"blk.1.ffn_up.weight": None}))


def test_a_tensor_of_the_wrong_shape_is_named_as_in_the_file(tmp_path: Path) -> None:
    wrong = ("F32", (2, 64), bytes(512))
    with pytest.raises(SourceError, match=r"blk\.1\.ffn_up\.weight.*shape is \[2, 64\], expected \[160, 64\]"):
        open_source(written(tmp_path / "m.gguf", **{"blk.1.ffn_up.weight": wrong}))


def test_a_tensor_without_a_place_in_the_graph_is_unsupported(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"blk\.0\.attn_sinks\.weight"):
        open_source(written(tmp_path / "m.gguf", **{"blk.0.attn_sinks.weight": ("F32", (4,), bytes(16))}))


def test_a_file_without_output_has_tied_embeddings(tmp_path: Path) -> None:
    bundle = open_source(written(tmp_path / "m.gguf", **{"output.weight": None}))
    assert bundle.spec.tied_embeddings
    assert "lm_head.weight" not in bundle.tensors


@pytest.mark.parametrize("what", ["missing", "empty", "directory", "text"])
def test_what_is_no_source_is_refused(tmp_path: Path, what: str) -> None:
    path = tmp_path / "x"
    {"missing": lambda: None, "empty": path.touch, "directory": path.mkdir, "text": lambda: path.write_text("hello world, no model")}[
        what
    ]()
    with pytest.raises(SourceError) as caught:
        open_source(path)
    assert caught.value.remedy
