"""The first call that differs is the one whose weight was changed; submodels, lanes and chips give rows the same hashes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from calstack import api
from calstack.calbin.reader import open_calbin
from calstack.errors import UnsupportedError
from tests.support.tiny import DATA

ARTIFACTS = DATA.parent / "golden" / "artifacts" / "v1"
pytestmark = pytest.mark.native


def changed(tmp_path: Path, name: str, chip: int, part: str) -> tuple[Path, str]:
    """A copy with other codes in the first weight whose name holds `part`, and that weight's name."""
    path = tmp_path / name
    shutil.copytree(ARTIFACTS / name, path)
    calbin = open_calbin(path)
    tensor = next(t.name for t in calbin.manifest.tensors if t.chip == chip and part in t.name)
    start, nbytes = calbin.shard(chip).range(tensor)
    file = path / calbin.manifest.target.chips[chip].params
    data = bytearray(file.read_bytes())
    for i in range(start, start + nbytes, 64):
        data[i] ^= 1
    file.write_bytes(data)
    return path, tensor


def test_every_row_has_the_bits_of_the_reference_in_every_submodel() -> None:
    for name in ("llama-w4a8.calbin", "moe-two-chips-i8.calbin"):
        report = api.bisect(ARTIFACTS / name)
        assert not report.differ
        streams = [stream for s in open_calbin(ARTIFACTS / name).manifest.submodels for stream in _streams(name, s.key)]
        assert report.calls == sum(map(len, streams))


def _streams(name: str, key: str) -> tuple[tuple[object, ...], ...]:
    return open_calbin(ARTIFACTS / name).program(key).streams


@pytest.mark.parametrize(
    ("name", "chip", "part", "op"),
    [
        ("llama-w4a8.calbin", 0, "layers.1.mlp.down", "linear"),
        ("llama-w4a8.calbin", 0, "layers.1.self_attn.{q", "norm_linear"),
        ("moe-two-chips-i8.calbin", 1, "layers.0.mlp.experts.down", "moe_experts"),
        ("moe-two-chips-i8.calbin", 1, "layers.1.self_attn.o_proj", "linear"),
    ],
)
def test_a_changed_weight_is_found_at_the_call_that_reads_it(tmp_path: Path, name: str, chip: int, part: str, op: str) -> None:
    path, tensor = changed(tmp_path, name, chip, part)
    report = api.bisect(path, against=ARTIFACTS / name)
    assert len(report.differ) == len(open_calbin(path).manifest.submodels)
    assert {(d.chip, d.op) for d in report.differ} == {(chip, op)}
    assert all(tensor in d.tensors for d in report.differ)
    assert tensor in report.text()


def test_an_encoder_has_the_bits_of_the_reference_and_of_many_texts_in_one_launch(tmp_path: Path) -> None:
    path = api.compile_model(DATA / "tiny-bert", tmp_path / "bert.calbin", options=api.CompileOptions(quality=False))
    assert not api.bisect(path).differ
    report = api.verify(path, full=True)
    assert report.good
    assert [way.positions for way in report.ways] == [63, 64]


def test_calbins_with_other_programs_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="other calls"):
        api.bisect(ARTIFACTS / "llama-w4a8.calbin", against=ARTIFACTS / "moe-two-chips-i8.calbin")


def test_a_device_that_does_not_say_what_its_calls_wrote_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="does not say"):
        api.bisect(ARTIFACTS / "llama-w4a8.calbin", device="null")


def test_the_report_is_data_too() -> None:
    import msgspec

    report = api.bisect(ARTIFACTS / "llama-w4a8.calbin")
    assert json.loads(msgspec.json.encode(report))["differ"] == []
