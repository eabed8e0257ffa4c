"""Artifacts of format 1 as committed: every later version reads them and computes their bits.

Written once, by `python -m tests.golden.test_artifacts`; a format that cannot read them is a new major version.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from calstack import api
from calstack.calbin.compat import Wish, nearest
from calstack.calbin.manifest import Submodel
from calstack.calbin.reader import open_calbin, read_manifest
from calstack.calbin.versions import matrix, meets
from calstack.errors import ArtifactError
from calstack.quality.feed import Feeder
from calstack.specs import KVDType, QuantSpec, Role, WeightFormat
from tests.support.tiny import DATA

FOLDER = Path(__file__).parent / "artifacts" / "v1"
W4A8, W8A8 = (QuantSpec(default=fmt) for fmt in (WeightFormat.W4A8, WeightFormat.W8A8))
MADE = {
    "llama-w4a8": ("tiny-llama", api.CompileOptions(quant=W4A8, batches=(1, 4), context=256)),
    "moe-two-chips-i8": (
        "tiny-qwen3-moe",
        api.CompileOptions(target="calculet-2", quant=W8A8, batches=(1, 2), context=256, kv_dtype=KVDType.I8, quality=False),
    ),
}

pytestmark = pytest.mark.native


@pytest.mark.parametrize("name", MADE)
def test_a_committed_artifact_is_read_and_has_its_bits(name: str) -> None:
    report = api.verify(FOLDER / f"{name}.calbin")
    assert report.good
    assert all(s.bits for s in report.submodels)


def test_a_full_check_goes_every_way_at_every_edge_and_sees_one_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    path = FOLDER / "llama-w4a8.calbin"
    report = api.verify(path, full=True)
    assert report.good
    assert [w.positions for w in report.ways] == [63, 64, 65, 255, 256]
    assert all(w.ways == 5 for w in report.ways)
    run = Feeder.run

    def wrong(self: Feeder, submodel: Submodel, sequences: Sequence[Sequence[int]], *, first: int = 0) -> list[npt.NDArray[np.float32]]:
        rows = run(self, submodel, sequences, first=first)
        return [r + np.float32(submodel.batch == 4 and len(sequences) > 1) for r in rows]

    monkeypatch.setattr(Feeder, "run", wrong)
    worse = api.verify(path, full=True)
    assert not worse.good
    assert any("lanes" in name for w in worse.ways for name in w.differ)


def changed(tmp_path: Path, **fields: object) -> Path:
    path = tmp_path / "m.calbin"
    shutil.copytree(FOLDER / "llama-w4a8.calbin", path)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["compatibility"] |= fields
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"runtime": ">=99.0.0"}, r"needs a runtime >=99\.0\.0, this is 0\."),
        ({"compiler": "0.0.1"}, r"compiler 0\.0\.1, calstack 0\..* reads format 1\.0"),
        ({"format": "7.0"}, r"format 7\.0"),
    ],
)
def test_versions_that_do_not_meet_are_refused_with_both_named(tmp_path: Path, fields: dict[str, str], said: str) -> None:
    with pytest.raises(ArtifactError, match=said):
        open_calbin(changed(tmp_path, **fields))


def test_the_device_a_calbin_needs_is_compared_at_load(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="needs calculet, device cpu has cpu"):
        api.load(changed(tmp_path, device="calculet"))


def test_the_matrix_holds_this_format() -> None:
    assert "1.0" in {row.format for row in matrix()}
    assert meets("0.2.1", ">=0.1.9")
    assert not meets("0.1.9", ">=0.2")
    assert not meets("x", ">=0.2")


def test_a_launch_that_does_not_fit_is_told_the_nearest_that_does() -> None:
    manifest = read_manifest(FOLDER / "llama-w4a8.calbin")
    best, missed = nearest(manifest, Wish(role=Role.DECODE, batch=9, tokens=1, context=100))
    assert best is not None
    assert (best.batch, [m.field.rpartition(".")[2] for m in missed]) == (4, ["batch"])
    assert nearest(manifest, Wish(role=Role.DECODE, batch=3, tokens=1, context=256))[1] == ()
    assert nearest(manifest, Wish(role=Role.ENCODE, batch=1, tokens=1, context=1))[0] is None


def main() -> None:
    for name, (model, options) in MADE.items():
        api.compile_model(DATA / model, FOLDER / f"{name}.calbin", options=options, replace=True)


if __name__ == "__main__":
    main()
