"""The cpu device in f32 with f32 KV against committed logits of transformers, whole path: source → graphs → calbin → launches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from calstack import api
from calstack.calbin.reader import open_calbin
from calstack.devices.base import Device, LaneInput, Launch, LogitRows, OpenOptions
from calstack.devices.registry import open_device
from calstack.specs import KVDType, QuantSpec, WeightFormat
from tests.support.gguf_files import DATA

VECTORS = Path(__file__).parent / "models"
MODELS = ("tiny-llama", "tiny-qwen3", "tiny-mistral", "tiny-qwen2", "tiny-phi3", "tiny-qwen3-moe", "tiny-mixtral", "tiny-gemma3")
OPTIONS = api.CompileOptions(quant=QuantSpec(default=WeightFormat.F32), kv_dtype=KVDType.F32, batches=(1, 4), quality=False)

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def calbins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("vectors")
    return {model: api.compile_model(DATA / model, base / f"{model}.calbin", options=OPTIONS) for model in MODELS}


def device_logits(device: Device, calbin: Path, ids: Sequence[int], chunks: Sequence[int]) -> np.ndarray:
    """Logits of every position, `ids` fed in `chunks` (1 = a decode launch) through blocks out of order."""
    manifest = open_calbin(calbin).manifest
    handle = device.load(calbin, kv_blocks=8)
    largest = {role: max((s for s in manifest.submodels if s.role == role), key=lambda s: -s.batch).key for role in ("prefill", "decode")}
    rows, past = [], 0
    for size in chunks:
        tokens = [int(i) for i in ids[past : past + size]]
        lane = LaneInput(past_len=past, cur_len=len(tokens), blocks=(5, 2, 7, 0), tokens=tokens, logits=LogitRows.ALL)
        done = device.wait(device.submit(Launch(handle, largest["decode" if size == 1 else "prefill"], (lane,))), 30)
        assert done is not None
        assert done.error is None, done.error
        logits = done.lanes[0].logits
        assert logits is not None
        rows.append(logits)
        past += len(tokens)
    return np.concatenate(rows)


@pytest.mark.parametrize("isa", ["reference", ""])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("chunks", [(160,), (100, 60), (64, 33, *[1] * 63)], ids=["whole", "two chunks", "prefill and decode"])
def test_device_logits_equal_transformers(calbins: dict[str, Path], model: str, isa: str, chunks: tuple[int, ...]) -> None:
    vectors = load_file(VECTORS / f"{model}.safetensors")
    device = open_device("cpu", OpenOptions(isa=isa, strict=True))
    try:
        logits = device_logits(device, calbins[model], vectors["ids"].tolist(), chunks)
    finally:
        device.close()
    assert np.abs(logits - vectors["logits"]).max() <= 1e-4 * np.abs(vectors["logits"]).max()
