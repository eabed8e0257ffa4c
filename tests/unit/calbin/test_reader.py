from pathlib import Path
from typing import Any

import pytest

from calstack.calbin.reader import MANIFEST, open_calbin, verify_files
from calstack.errors import ArtifactError
from tests.support.calbins import KEY, edit_json, edit_manifest, write_calbin

PROGRAM = f"programs/{KEY}.json"


@pytest.fixture
def calbin(tmp_path: Path) -> Path:
    return write_calbin(tmp_path / "m.calbin")


def refused(path: Path) -> str:
    with pytest.raises(ArtifactError) as caught:
        verify_files(open_calbin(path))
    line = str(caught.value)
    assert "\n" not in line
    assert caught.value.remedy
    assert caught.value.exit_code == 2
    return line


def test_sound_calbin_opens_and_its_checksums_hold(calbin: Path) -> None:
    opened = open_calbin(calbin)
    assert opened.program(KEY).submodel == KEY
    assert verify_files(opened) == sum(entry.bytes for entry in opened.manifest.files)
    assert opened.shard(0).names()[0] == "embed"
    assert opened.read("tokenizer.json") == b"{}"


def test_directory_without_manifest_is_no_calbin(tmp_path: Path) -> None:
    assert "manifest.json" in refused(tmp_path)
    assert "manifest.json" in refused(tmp_path / "missing")


def test_newer_minor_with_a_field_unknown_here_is_read(calbin: Path) -> None:
    edit_manifest(calbin, format_minor=7, something_new={"a": [1]}, kv__also_new=3)
    assert open_calbin(calbin).manifest.format_minor == 7


def test_other_major_is_refused_before_anything_else_is_understood(calbin: Path) -> None:
    edit_manifest(calbin, format_major=2, submodels="in another form")
    assert "$.format_major" in refused(calbin)


def test_unknown_feature_is_refused_by_name(calbin: Path) -> None:
    edit_manifest(calbin, requires=["telepathy"])
    assert "telepathy" in refused(calbin)
    assert "$.requires" in refused(calbin)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"numerics": 9}, "$.numerics"),
        ({"packed_layout": "n32"}, "$.packed_layout"),
        ({"submodels": []}, "$.submodels"),
        ({"target__chips": []}, "$.target.chips"),
        ({"target__chips__0__id": 1}, "$.target.chips"),
        ({"submodels__0__role": "llm_decode"}, "$.submodels[0].role"),
        ({"submodels__0__batch": 0}, "$.submodels[0].batch"),
        ({"submodels__0__rows": 1 << 40}, "$.submodels[0].rows"),
        ({"submodels__0__context": -1}, "$.submodels[0].context"),
        ({"submodels__0__program": "programs/none.json"}, "$.submodels[0].program"),
        ({"kv__bytes_per_block": 1}, "$.kv.bytes_per_block"),
        ({"kv__head_dim": 1 << 50}, "$.kv.head_dim"),
        ({"tensors__0__bytes": 1 << 60}, "params/chip0.safetensors"),
        ({"tensors__0__bytes": -1}, "params/chip0.safetensors"),
        ({"tensors__0__name": "other"}, "embed"),
        ({"tensors__1__name": "embed"}, "$.tensors[1]"),
        ({"files__0__bytes": 5}, "$.files[0].bytes"),
        ({"files__0__sha256": "0" * 64}, "$.files[0].sha256"),
        ({"files__1__path": "params/chip0.safetensors"}, "$.files[1]"),
        ({"model__vocab": 0}, "$.model.vocab"),
        ({"target__chips__0__activation_bytes": 64}, "$.arena_bytes[0]"),
        ({"format_minor": "one"}, "$.format_minor"),
    ],
)
def test_bad_manifest_field_is_named(calbin: Path, change: dict[str, Any], said: str) -> None:
    edit_manifest(calbin, **change)
    assert said in refused(calbin)


@pytest.mark.parametrize("path", ["../outside", "/etc/passwd", "a/../../outside", "", "params\\chip0", "params", "a\0b"])
def test_path_that_leaves_the_directory_or_is_no_file_is_refused(calbin: Path, path: str) -> None:
    (calbin.parent / "outside").write_bytes(b"{}")
    edit_manifest(calbin, files__2__path=path)
    assert "$.files[2].path" in refused(calbin)


def test_symbolic_link_to_a_file_outside_is_refused(calbin: Path) -> None:
    outside = calbin.parent / "outside.json"
    outside.write_bytes((calbin / "tokenizer.json").read_bytes())
    (calbin / "tokenizer.json").unlink()
    (calbin / "tokenizer.json").symlink_to(outside)
    assert "inside the directory" in refused(calbin)


def test_missing_file_is_named(calbin: Path) -> None:
    (calbin / PROGRAM).unlink()
    assert PROGRAM in refused(calbin)


def test_changed_byte_of_a_parameter_is_found_by_its_checksum(calbin: Path) -> None:
    path = calbin / "params/chip0.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    open_calbin(calbin)
    assert "checksum of params/chip0.safetensors" in refused(calbin)


def test_deeply_nested_json_ends_in_a_refusal(calbin: Path) -> None:
    (calbin / MANIFEST).write_bytes(b'{"format_major":1,"x":' + b"[" * 200_000)
    assert "not valid" in refused(calbin)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 2}, "$.version"),
        ({"rows": 3}, "$.rows"),
        ({"context": 4096}, "$.context"),
        ({"streams": []}, "$.streams"),
        ({"buffers__0__offset": 1 << 40}, "$.buffers[0].offset"),
        ({"buffers__0__offset": -64}, "$.buffers[0].offset"),
        ({"buffers__0__offset": 4}, "$.buffers[0].offset"),
        ({"buffers__0__width": 1 << 30}, "$.buffers[0].width"),
        ({"buffers__0__name": "y"}, "$.streams[0][0].out"),
        ({"buffers__1__name": "x"}, "$.buffers[1]"),
        ({"buffers__0__rows": 1}, "$.streams[0][0].out"),
        ({"buffers__0__dtype": "i8"}, "$.streams[0][0].out"),
        ({"streams__0__0__weight__n": 1 << 40}, "$.streams[0][0].weight.n"),
        ({"streams__0__0__weight__n": 80}, "$.streams[0][0].weight.tensor"),
        ({"streams__0__0__weight__tensor": "none"}, "$.streams[0][0].weight.tensor"),
        ({"streams__0__0__weight__group": 0}, "$.streams[0][0].weight.group"),
        ({"streams__0__0__weight__group": 12}, "$.streams[0][0].weight.group"),
        ({"streams__0__0__weight__minimum": True}, "$.streams[0][0].weight.minimum"),
        ({"streams__0__2__norm__n": 31}, "$.streams[0][2].norm.n"),
        ({"streams__0__2__bias": {"tensor": "norm", "n": 32}}, "$.streams[0][2].bias.n"),
        ({"streams__0__3__kv_layer": 1}, "$.streams[0][3].kv_layer"),
        ({"streams__0__3__kv_layer": -1}, "$.streams[0][3].kv_layer"),
        ({"streams__0__3__head_dim": 8}, "$.streams[0][3].kv_heads"),
        ({"streams__0__3__heads": 0}, "$.streams[0][3].heads"),
        ({"streams__0__3__rope_dim": 15}, "$.streams[0][3].table"),
        ({"streams__0__4__window": -1}, "$.streams[0][4].window"),
        ({"streams__0__5__residual": None}, "$.streams[0][5].out"),
        ({"streams__0__5__out": "x"}, "$.streams[0][5].out"),
        ({"streams__0__6__weight__n": 120}, "$.streams[0][6].weight"),
        ({"streams__0__0__op": "system"}, "op"),
        ({"streams__0__0__more": 1}, "more"),
    ],
)
def test_bad_program_field_is_named(calbin: Path, change: dict[str, Any], said: str) -> None:
    edit_json(calbin / PROGRAM, **change)
    edit_manifest(calbin, **{f"files__{index_of(calbin, PROGRAM)}__bytes": (calbin / PROGRAM).stat().st_size})
    line = refused(calbin)
    assert said in line
    assert PROGRAM in line


def index_of(calbin: Path, path: str) -> int:
    import json

    return [entry["path"] for entry in json.loads((calbin / MANIFEST).read_bytes())["files"]].index(path)


def test_unknown_submodel_and_chip_are_errors(calbin: Path) -> None:
    opened = open_calbin(calbin)
    with pytest.raises(ArtifactError, match=KEY):
        opened.program("decode")
    with pytest.raises(ArtifactError, match="chip 1"):
        opened.shard(1)
