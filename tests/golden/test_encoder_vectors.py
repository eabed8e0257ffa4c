"""The encoder's graph under onnxruntime against committed states and scores of transformers (tools/make_reference_vectors.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from calstack.errors import UnsupportedError
from calstack.frontends import open_source
from calstack.frontends.onnx_dir import keep_onnx
from calstack.graph.encode import run_encoder
from calstack.graph.model import GraphBundle
from tests.support.encoders import sentence_encoder
from tests.support.gguf_files import DATA

VECTORS = Path(__file__).parent / "models/tiny-bert.safetensors"


def relative(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(got - want).max() / np.abs(want).max())


def rows(vectors: dict[str, np.ndarray], key: str) -> list[list[int]]:
    return [row[:length].tolist() for row, length in zip(vectors[key], vectors["lengths"], strict=True)]


@pytest.mark.parametrize("budget", [0, 20_000])
def test_states_and_scores_equal_transformers(budget: int) -> None:
    vectors = load_file(VECTORS)
    found = run_encoder(open_source(DATA / "tiny-bert"), rows(vectors, "ids"), rows(vectors, "types"), budget_bytes=budget)
    assert relative(found["hidden"], vectors["hidden"]) <= 1e-5
    assert relative(found["scores"], vectors["scores"]) <= 1e-5


def test_a_text_alone_gives_what_it_gives_padded() -> None:
    vectors = load_file(VECTORS)
    found = run_encoder(open_source(DATA / "tiny-bert"), rows(vectors, "ids")[1:], rows(vectors, "types")[1:])
    assert relative(found["scores"], vectors["scores"][1:]) <= 1e-5


def test_kept_graphs_are_read_again(tmp_path: Path) -> None:
    bundle = open_source(DATA / "tiny-bert")
    keep_onnx(bundle, tmp_path / "kept")
    again = open_source(tmp_path / "kept")
    assert (again.spec, list(again.tensors)) == (bundle.spec, list(bundle.tensors))
    vectors = load_file(VECTORS)
    found = run_encoder(again, rows(vectors, "ids"), rows(vectors, "types"))
    assert relative(found["scores"], vectors["scores"]) <= 1e-5


def pooled(tmp_path: Path, pooling: str, *, normalise: bool) -> GraphBundle:
    """Opened."""
    return open_source(sentence_encoder(tmp_path / "st", pooling, normalise=normalise))


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("normalise", [True, False])
def test_an_embedding_is_pooled_as_the_directory_says(tmp_path: Path, pooling: str, normalise: bool) -> None:
    bundle = pooled(tmp_path, pooling, normalise=normalise)
    assert bundle.spec.context == 48
    vectors = load_file(VECTORS)
    found = run_encoder(bundle, rows(vectors, "ids"), rows(vectors, "types"))
    assert "scores" not in found
    states, lengths = vectors["hidden"], vectors["lengths"]
    want = states[:, 0] if pooling == "cls" else states.sum(1) / lengths[:, None]
    want = want / np.linalg.norm(want, axis=1, keepdims=True) if normalise else want
    assert relative(found["embedding"], want) <= 1e-5


def test_another_pooling_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="pooling"):
        pooled(tmp_path, "max", normalise=False)


def test_an_encoder_has_no_prefill_graph() -> None:
    with pytest.raises(UnsupportedError, match="prefill"):
        _ = open_source(DATA / "tiny-bert").prefill
