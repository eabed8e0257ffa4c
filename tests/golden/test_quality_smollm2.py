"""What compiling costs in quality, on the real model and a named text: our exact import, and our own quantiser."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calstack import api
from calstack.calbin.reader import open_calbin
from calstack.devices.registry import open_device
from calstack.errors import UsageError
from calstack.frontends import open_source
from calstack.graph.evaluate import Oracle
from calstack.graph.model import GraphBundle
from calstack.progress import Silent
from calstack.quality.card import QualityCard, measure
from calstack.quality.feed import Feeder
from calstack.quality.text import WINDOW, bundled_text
from calstack.specs import QuantSpec, WeightFormat
from tests.support.hf_directory import write_hf

pytestmark = [pytest.mark.native, pytest.mark.model]

WINDOWS, ALL_WINDOWS = 3, 64


class Remembered(Oracle):
    """The reference, asked once per window."""

    def __init__(self, bundle: GraphBundle) -> None:
        super().__init__(bundle)
        self._known: dict[tuple[int, ...], Any] = {}

    def logits(self, ids: Sequence[int], *, chunk: int = 512) -> Any:
        if tuple(ids) not in self._known:
            if len(self._known) > WINDOWS + 4:
                self._known.clear()
            self._known[tuple(ids)] = super().logits(ids, chunk=chunk)
        return self._known[tuple(ids)]


@contextmanager
def feeding(calbin: Path) -> Iterator[Feeder]:
    device = open_device("cpu")
    try:
        with Feeder(device, calbin, open_calbin(calbin).manifest, lanes=1, positions=WINDOW) as feeder:
            yield feeder
    finally:
        device.close()


def card(calbin: Path, oracle: Oracle, windows: int = WINDOWS) -> QualityCard:
    opened = open_calbin(calbin)
    with feeding(calbin) as feeder:
        return measure(feeder, opened.manifest, oracle, opened.read("tokenizer.json"), bundled_text(), windows, Silent())


@pytest.fixture(scope="module")
def source(smollm2_gguf: Path) -> GraphBundle:
    return open_source(smollm2_gguf)


@pytest.fixture(scope="module")
def oracle(source: GraphBundle) -> Oracle:
    return Remembered(source)


@pytest.fixture(scope="module")
def hf(source: GraphBundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(source, tmp_path_factory.mktemp("hf") / "smollm2")


@pytest.fixture(scope="module")
def exact(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file as it is, every layer w4a8 (the demo's own recipe keeps float activations in a few)."""
    return api.compile_model(
        smollm2_gguf, tmp_path_factory.mktemp("exact") / "w4a8", options=api.CompileOptions(batches=(1,), quality=False)
    )


def quantised(hf: Path, out: Path, fmt: WeightFormat) -> Path:
    options = api.CompileOptions(quant=QuantSpec(default=fmt), batches=(1,), quality=False)
    return api.compile_model(hf, out, options=options)


def test_exact_import_stays_close_to_the_reference(exact: Path, oracle: Oracle) -> None:
    found = card(exact, oracle)
    assert found.top1 >= 0.95
    assert 0 < found.kl_mean < 0.006
    assert found.perplexity == pytest.approx(found.reference_perplexity, rel=0.01)


def test_demo_card_holds_what_it_promises(smollm2_calbin: Path) -> None:
    summary = api.quality_summary(smollm2_calbin)
    assert float(summary["top1"]) >= 0.95
    assert 0 < float(summary["kl_mean"]) < 0.006
    assert float(summary["perplexity"]) == pytest.approx(float(summary["reference_perplexity"]), rel=0.005)
    assert all(row.exact for row in open_calbin(smollm2_calbin).manifest.quant)


def test_goldens_hold_on_the_machines_best_kernels(smollm2_calbin: Path) -> None:
    report = api.verify(smollm2_calbin)
    assert report.good, report.text()
    assert len(report.submodels) == len(open_calbin(smollm2_calbin).manifest.submodels)


@pytest.mark.full
@pytest.mark.parametrize("isa", ["avx2", "portable"])
def test_goldens_hold_with_equal_bits_on_other_kernels(smollm2_calbin: Path, isa: str) -> None:
    try:
        report = api.verify(smollm2_calbin, isa=isa)
    except UsageError:
        pytest.skip(f"this machine has no {isa}")
    assert report.good, report.text()


@pytest.mark.full
def test_own_four_bit_search_finds_the_exact_import_again(exact: Path, hf: Path, tmp_path: Path) -> None:
    """The search meets weights that lie on a 4-bit grid, and must find that very grid: equal bytes, so equal perplexity."""
    ours = quantised(hf, tmp_path / "w4", WeightFormat.W4A8)
    shard = "params/chip0.safetensors"
    assert np.array_equal(np.fromfile(ours / shard, np.uint8), np.fromfile(exact / shard, np.uint8))


@pytest.mark.full
def test_own_eight_bits_stay_close_to_the_reference(hf: Path, oracle: Oracle, tmp_path: Path) -> None:
    found = card(quantised(hf, tmp_path / "w8", WeightFormat.W8A8), oracle)
    assert 0 < found.kl_mean < 0.006
    assert found.perplexity == pytest.approx(found.reference_perplexity, rel=0.01)


@pytest.mark.full
def test_whole_text_on_exact_import_and_own_quantiser(exact: Path, hf: Path, source: GraphBundle, tmp_path: Path) -> None:
    oracle = Oracle(source)
    found = card(exact, oracle, ALL_WINDOWS)
    assert found.windows == ALL_WINDOWS
    assert found.top1 >= 0.95
    assert found.kl_mean < 0.006
    four = card(quantised(hf, tmp_path / "w4", WeightFormat.W4A8), oracle, ALL_WINDOWS)
    assert four.perplexity == pytest.approx(found.perplexity, rel=0.005)
    assert card(quantised(hf, tmp_path / "w8", WeightFormat.W8A8), oracle, ALL_WINDOWS).kl_mean < 0.006


@pytest.mark.full  # small models do so by default: tests/golden/test_keep_onnx.py
def test_kept_graphs_compile_to_the_same_programs_and_parameters(smollm2_gguf: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    options = api.CompileOptions(keep_onnx=kept, batches=(1,), quality=False)
    first = api.compile_model(smollm2_gguf, tmp_path / "a", options=options)
    second = api.compile_model(kept, tmp_path / "b", options=api.CompileOptions(batches=(1,), quality=False))
    compared = [p for p in first.rglob("*") if p.is_file() and p.parent.name in {"programs", "params", "golden"}]
    assert len(compared) == 7  # prefill, decode and extend: program and golden each; one shard
    for path in compared:
        assert np.array_equal(np.fromfile(path, np.uint8), np.fromfile(second / path.relative_to(first), np.uint8)), path
