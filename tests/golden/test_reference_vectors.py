"""Our graphs under onnxruntime against committed logits of transformers (tools/make_reference_vectors.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from calstack.frontends import open_source
from calstack.frontends.arch.rope import inverse_frequencies
from calstack.graph.evaluate import Oracle, Phase
from calstack.specs import RopeSpec
from tests.support.gguf_files import DATA, write_tiny_gguf

VECTORS = Path(__file__).parent / "models"
TOOL = Path(__file__).parents[2] / "tools/make_reference_vectors.py"
MODELS = ("tiny-llama", "tiny-qwen3", "tiny-mistral", "tiny-qwen2", "tiny-phi3", "tiny-gemma3", "tiny-qwen3-moe", "tiny-mixtral")
ROPES = {
    "linear": RopeSpec(theta=500000.0, dim=64, scaling="linear", factor=4.0),
    "llama3": RopeSpec(theta=500000.0, dim=64, scaling="llama3", factor=8.0, original_context=8192),
    "yarn": RopeSpec(theta=500000.0, dim=64, scaling="yarn", factor=4.0, original_context=4096, attention_factor=1.1386294),
}


def relative(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(got - want).max() / np.abs(want).max())


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("phase", "chunk"), [("prefill", 160), ("prefill", 100), ("prefill", 7), ("decode", 1)])
def test_graph_logits_equal_transformers(model: str, phase: Phase, chunk: int) -> None:
    vectors = load_file(VECTORS / f"{model}.safetensors")
    logits = Oracle(open_source(DATA / model), phase=phase).logits(vectors["ids"].tolist(), chunk=chunk)
    assert relative(logits, vectors["logits"]) <= 1e-5


@pytest.mark.parametrize("model", [m for m in MODELS if m != "tiny-mistral"])  # GGUF has no window for what it calls llama
def test_gguf_of_the_same_weights_gives_the_same_logits(model: str, tmp_path: Path) -> None:
    vectors = load_file(VECTORS / f"{model}.safetensors")
    bundle = open_source(write_tiny_gguf(tmp_path / "m.gguf", model, "F32"))
    assert relative(Oracle(bundle).logits(vectors["ids"].tolist()), vectors["logits"]) <= 1e-5


@pytest.mark.parametrize("scaling", ROPES)
def test_scaled_rope_frequencies_equal_transformers(scaling: str) -> None:
    vectors = load_file(VECTORS / "rope.safetensors")
    rope = ROPES[scaling]
    np.testing.assert_allclose(inverse_frequencies(rope), vectors[f"{scaling}.inv_freq"], rtol=1e-6)
    assert rope.attention_factor == pytest.approx(float(vectors[f"{scaling}.attention_factor"][0]), rel=1e-6)


@pytest.mark.live
def test_live_transformers_give_the_committed_vectors() -> None:
    done = subprocess.run([sys.executable, str(TOOL), "--check"], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
