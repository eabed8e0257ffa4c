"""Compiling a tiny model adds goldens that hold on every instruction set, and that see a change of one weight."""

import json
from pathlib import Path

import numpy as np
import pytest

from calstack import api
from calstack.calbin.reader import MANIFEST, open_calbin
from calstack.specs import QuantSpec, WeightFormat
from tests.support.tiny import DATA, TINY

pytestmark = pytest.mark.native

F32 = QuantSpec(default=WeightFormat.F32)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    made = {}
    for name in TINY:
        for label, quant in (("w8", QuantSpec()), ("f32", F32)):
            options = api.CompileOptions(quant=quant, batches=(1, 4), context=256, quality=label == "w8")
            made[f"{name}/{label}"] = api.compile_model(DATA / name, root / f"{name}-{label}.calbin", options=options)
    return made


@pytest.mark.parametrize("which", [f"{name}/{label}" for name in TINY for label in ("w8", "f32")])
@pytest.mark.parametrize("isa", ["", "portable", "reference"])
def test_goldens_hold_with_equal_bits_on_every_instruction_set(compiled: dict[str, Path], which: str, isa: str) -> None:
    report = api.verify(compiled[which], isa=isa, threads=1)
    assert report.good, report.text()
    assert [s.submodel for s in report.submodels] == [s.key for s in open_calbin(compiled[which]).manifest.submodels]
    assert all(s.bits for s in report.submodels)
    assert {s.kind for s in report.submodels} == {"kl" if which.endswith("w8") else "max_abs"}


def test_quality_card_names_text_and_stays_close_to_the_reference(compiled: dict[str, Path]) -> None:
    card = json.loads((compiled["tiny-llama/w8"] / "quality.json").read_bytes())
    assert card["text"]["name"] == "state-of-the-union-1959-1966"
    assert card["windows"] == 8
    assert card["scored"] == 8 * 127  # windows of the context, 256
    assert card["perplexity"] == pytest.approx(card["reference_perplexity"], rel=0.02)
    assert 0 < card["kl_mean"] <= card["kl_p99"] <= card["kl_max"]
    assert api.quality_summary(compiled["tiny-llama/w8"])["top1"] == card["top1"]
    assert api.quality_summary(compiled["tiny-llama/f32"]) == {}


def tampered(calbin: Path, out: Path) -> Path:
    """A copy in which one scale of a packed weight is doubled, its checksum made right again."""
    import hashlib
    import shutil

    shutil.copytree(calbin, out)
    opened = open_calbin(out)
    name = next(t.name for t in opened.manifest.tensors if "down_proj" in t.name)
    start, room = opened.shard(0).range(name)
    path = out / "params/chip0.safetensors"
    data = bytearray(path.read_bytes())
    values = np.frombuffer(bytes(data[start : start + 4096 if room > 4096 else start + room]), np.uint8) ^ np.uint8(0x55)
    data[start : start + len(values)] = values.tobytes()
    path.write_bytes(data)
    manifest = json.loads((out / MANIFEST).read_bytes())
    for entry in manifest["files"]:
        if entry["path"] == "params/chip0.safetensors":
            entry["sha256"] = hashlib.sha256(data).hexdigest()
    (out / MANIFEST).write_text(json.dumps(manifest))
    return out


def test_other_weights_under_a_right_checksum_are_seen_by_the_goldens(compiled: dict[str, Path], tmp_path: Path) -> None:
    report = api.verify(tampered(compiled["tiny-llama/w8"], tmp_path / "m"))
    assert not report.good
    assert "BITS DIFFER" in report.text()
    assert not any(s.bits for s in report.submodels)


def test_compiling_twice_gives_the_same_bytes(compiled: dict[str, Path], tmp_path: Path) -> None:
    first = compiled["tiny-llama/w8"]
    options = api.CompileOptions(batches=(1, 4), context=256)
    second = api.compile_model(DATA / "tiny-llama", tmp_path / "again", options=options)
    for path in (p for p in first.rglob("*") if p.is_file()):
        assert (second / path.relative_to(first)).read_bytes() == path.read_bytes(), path
