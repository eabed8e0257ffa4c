"""Encoders on the cpu device: the tiny one against transformers' committed states and scores, and texts that never see their neighbours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from calstack import api
from calstack.calbin.reader import open_calbin
from calstack.devices.base import Device, LaneInput, LaneOutput, Launch, OpenOptions
from calstack.devices.registry import open_device
from calstack.errors import ArtifactError, DeviceError, UnsupportedError
from calstack.native import kernels
from calstack.specs import QuantSpec, WeightFormat
from tests.support.encoders import sentence_encoder
from tests.support.gguf_files import DATA

VECTORS = load_file(Path(__file__).parent / "models/tiny-bert.safetensors")
FORMATS = (WeightFormat.F32, WeightFormat.W8A8, WeightFormat.W4A8)

pytestmark = pytest.mark.native


def options(fmt: WeightFormat) -> api.CompileOptions:
    return api.CompileOptions(quant=QuantSpec(default=fmt), batches=(1, 8), quality=False)


@pytest.fixture(scope="module")
def calbins(tmp_path_factory: pytest.TempPathFactory) -> dict[WeightFormat, Path]:
    base = tmp_path_factory.mktemp("encoders")
    return {fmt: api.compile_model(DATA / "tiny-bert", base / f"{fmt}.calbin", options=options(fmt)) for fmt in FORMATS}


@pytest.fixture(params=["reference", ""])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    opened = open_device("cpu", OpenOptions(isa=request.param, strict=True))
    yield opened
    opened.close()


def run(device: Device, calbin: Path, texts: Sequence[tuple[list[int], list[int]]]) -> tuple[LaneOutput, ...]:
    handle = device.load(calbin, kv_blocks=0)
    try:
        lanes = tuple(LaneInput(past_len=0, cur_len=len(ids), blocks=(), tokens=ids, types=types) for ids, types in texts)
        done = device.wait(device.submit(Launch(handle, open_calbin(calbin).manifest.submodels[0].key, lanes)), 30)
        assert done is not None
        assert done.error is None, done.error
        return done.lanes
    finally:
        device.unload(handle)


def texts_of_vectors() -> list[tuple[list[int], list[int]]]:
    return [
        (ids[:n].tolist(), types[:n].tolist()) for ids, types, n in zip(VECTORS["ids"], VECTORS["types"], VECTORS["lengths"], strict=True)
    ]


def random_texts(lengths: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    rng = np.random.default_rng(5)
    return [(rng.integers(4, 300, n).tolist(), [int(i > n // 2) for i in range(n)]) for n in lengths]


def test_scores_equal_transformers(device: Device, calbins: dict[WeightFormat, Path]) -> None:
    found = np.stack([out.scores for out in run(device, calbins[WeightFormat.F32], texts_of_vectors()) if out.scores is not None])
    assert np.abs(found - VECTORS["scores"]).max() <= 1e-4 * np.abs(VECTORS["scores"]).max()


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("normalise", [True, False])
def test_embeddings_are_transformers_states_pooled(device: Device, tmp_path: Path, pooling: str, normalise: bool) -> None:
    source = sentence_encoder(tmp_path / "st", pooling, normalise=normalise)
    calbin = api.compile_model(source, tmp_path / "st.calbin", options=options(WeightFormat.F32))
    for out, states, n in zip(run(device, calbin, texts_of_vectors()), VECTORS["hidden"], VECTORS["lengths"], strict=True):
        want = states[0] if pooling == "cls" else states[:n].mean(0)
        want = want / np.linalg.norm(want) if normalise else want
        assert out.embedding is not None
        assert out.scores is None
        assert np.abs(out.embedding - want).max() <= 1e-4 * np.abs(want).max()


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_text_gives_the_same_bits_alone_and_among_others(calbins: dict[WeightFormat, Path], fmt: WeightFormat) -> None:
    texts = random_texts([1, 64, 3, 63, 17, 64, 2, 40])
    device = open_device("cpu", OpenOptions(strict=True))
    together = [out.scores for out in run(device, calbins[fmt], texts)]
    turned = [out.scores for out in run(device, calbins[fmt], texts[::-1])][::-1]
    for text, one, other in zip(texts, together, turned, strict=True):
        alone = run(device, calbins[fmt], [text])[0].scores
        assert one is not None
        assert other is not None
        assert alone is not None
        assert alone.tobytes() == one.tobytes() == other.tobytes()
    device.close()


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_instruction_set_gives_the_bits_of_the_reference(calbins: dict[WeightFormat, Path], fmt: WeightFormat) -> None:
    texts, bits = random_texts([33, 1, 64, 20]), set()
    for isa in kernels.isas():
        for threads in (1, 3):
            device = open_device("cpu", OpenOptions(isa=isa, threads=threads))
            bits.add(b"".join(out.scores.tobytes() for out in run(device, calbins[fmt], texts) if out.scores is not None))
            device.close()
    assert len(bits) == 1


def test_goldens_are_verified_and_a_changed_weight_is_found(calbins: dict[WeightFormat, Path]) -> None:
    for calbin in calbins.values():
        report = api.verify(calbin)
        assert report.good, report.text()
        assert [s.kind for s in report.submodels] == ["max_abs"]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"past_len": 1}, "whole texts"),
        ({"blocks": (0,)}, "whole texts"),
        ({"emit": True}, "whole texts"),
        ({"types": (0, 1)}, "2 types"),
        ({"types": (0, 2, 0)}, "segments"),
        ({"types": (0, -1, 0)}, "segments"),
        ({"tokens": (1, 2)}, "2 tokens"),
        ({"tokens": (1, 2, 320)}, "vocabulary"),
    ],
)
def test_a_launch_that_no_encoder_can_take_is_refused(calbins: dict[WeightFormat, Path], change: dict[str, object], what: str) -> None:
    device = open_device("cpu", OpenOptions())
    handle = device.load(calbins[WeightFormat.F32], kv_blocks=0)
    fields: dict[str, object] = {"past_len": 0, "cur_len": 3, "blocks": (), "tokens": (1, 2, 3)} | change
    with pytest.raises(DeviceError, match=what):
        device.submit(Launch(handle, open_calbin(calbins[WeightFormat.F32]).manifest.submodels[0].key, (LaneInput(**fields),)))  # type: ignore[arg-type]
    device.close()


def test_an_encoder_that_gives_nothing_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    source = sentence_encoder(tmp_path / "st", "mean", normalise=False)
    (source / "modules.json").unlink()
    with pytest.raises(UnsupportedError, match=r"modules\.json"):
        api.compile_model(source, tmp_path / "none.calbin", options=options(WeightFormat.F32))


def test_an_encoder_is_compiled_for_one_chip(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="one chip"):
        api.compile_model(DATA / "tiny-bert", tmp_path / "two.calbin", options=api.CompileOptions(target="calculet-2"))


def test_generation_from_an_encoder_is_refused(calbins: dict[WeightFormat, Path]) -> None:
    with pytest.raises(ArtifactError, match="encoder"):
        api.load(calbins[WeightFormat.F32])
