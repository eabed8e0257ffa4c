"""tools/make_moe_gguf.py: its files import bit for bit, compile, and verify on every kernel set."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from calstack import api
from calstack.calbin.reader import open_calbin
from tests.support.gguf_files import DATA, write_tiny_gguf

pytest.importorskip("gguf")
pytestmark = pytest.mark.native

TOOL = Path(__file__).parents[2] / "tools/make_moe_gguf.py"
SMALL = {"hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= {"head_dim": 32, "num_experts": 16, "num_experts_per_tok": 4, "max_position_embeddings": 256}


def write(target: Path, beside: Path, kind: str) -> None:
    """The tool's file of two layers, from config.json and tokens.gguf in `beside`."""
    arguments = [str(path) for path in (TOOL, beside / "config.json", beside / "tokens.gguf", target)]
    subprocess.run([sys.executable, *arguments, "--layers", "2", "--type", kind], check=True, capture_output=True, timeout=120)


@pytest.fixture(params=["Q4_0", "Q4_1"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    config = json.loads((DATA / "configs/qwen3-30b-a3b.json").read_text()) | SMALL
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_tiny_gguf(tmp_path / "tokens.gguf")
    write(tmp_path / "moe.gguf", tmp_path, request.param)
    return request.param, tmp_path / "moe.gguf"


def test_a_random_mixture_compiles_bit_for_bit_and_verifies_on_every_kernel_set(made: tuple[str, Path], tmp_path: Path) -> None:
    kind, path = made
    calbin = api.compile_model(path, tmp_path / "moe.calbin", options=api.CompileOptions(batches=(1, 4)))
    quant = {q.tensor: q for q in open_calbin(calbin).manifest.quant}
    experts = [q for name, q in quant.items() if ".experts." in name]
    assert len(experts) == 2 * 3
    assert all((q.source, q.format, q.minimum, q.exact) == (kind, "w4a8", kind == "Q4_1", True) for q in experts)
    assert all(q.format == "f32" for name, q in quant.items() if name.endswith("mlp.gate.weight"))
    for isa in ("", "portable", "reference"):
        report = api.verify(calbin, isa=isa, threads=2)
        assert report.good, report.text()
        assert all(s.bits for s in report.submodels)


def test_the_same_seed_writes_the_same_bytes(made: tuple[str, Path], tmp_path: Path) -> None:
    kind, path = made
    write(tmp_path / "again.gguf", path.parent, kind)
    assert (tmp_path / "again.gguf").read_bytes() == path.read_bytes()
