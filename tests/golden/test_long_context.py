"""A context of 40,960 positions against transformers, prefilled in chunks, in f32; and what a decode step there costs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from calstack import api
from calstack.calbin.reader import open_calbin
from calstack.devices.base import LaneInput, Launch, LogitRows, OpenOptions
from calstack.devices.registry import open_device
from calstack.specs import KVDType, QuantSpec, Role, WeightFormat
from tests.support.tiny import DATA

VECTORS = Path(__file__).parent / "models" / "tiny-qwen3-long.safetensors"
LENGTH, CHUNK = 40_960, 512

pytestmark = [pytest.mark.native, pytest.mark.slow]


@pytest.fixture(scope="module")
def calbin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("long") / "model"
    shutil.copytree(DATA / "tiny-qwen3", source)
    config = json.loads((source / "config.json").read_text()) | {"max_position_embeddings": LENGTH}
    (source / "config.json").write_text(json.dumps(config))
    options = api.CompileOptions(
        quant=QuantSpec(default=WeightFormat.F32), kv_dtype=KVDType.F32, batches=(1,), context=LENGTH, quality=False
    )
    return api.compile_model(source, source.parent / "m.calbin", options=options)


def test_deep_positions_equal_transformers(calbin: Path) -> None:
    vectors = load_file(VECTORS)
    ids, at = [int(i) for i in vectors["ids"]], [int(i) for i in vectors["at"]]
    keys = {s.role: s.key for s in open_calbin(calbin).manifest.submodels}
    device = open_device("cpu", OpenOptions())
    handle = device.load(calbin, kv_blocks=LENGTH // 64)
    blocks = tuple(int(b) for b in np.random.default_rng(3).permutation(LENGTH // 64))
    rows: dict[int, np.ndarray] = {}

    def launch(role: Role, start: int, end: int) -> None:
        wanted = [p for p in at if start <= p < end]
        logits = LogitRows.ALL if wanted else LogitRows.NONE
        lane = LaneInput(past_len=start, cur_len=end - start, blocks=blocks, tokens=ids[start:end], logits=logits)
        done = device.wait(device.submit(Launch(handle, keys[role], (lane,))), 120)
        assert done is not None
        assert done.error is None, done.error
        for p in wanted:
            found = done.lanes[0].logits
            assert found is not None
            rows[p] = found[p - start]

    for start in range(0, LENGTH - CHUNK, CHUNK):
        launch(Role.PREFILL, start, start + CHUNK)
    launch(Role.PREFILL, LENGTH - CHUNK, LENGTH - 1)
    launch(Role.DECODE, LENGTH - 1, LENGTH)  # the last position by a decode launch
    device.close()
    for p, want in zip(at, vectors["logits"], strict=True):
        assert np.abs(rows[p] - want).max() <= 1e-4 * np.abs(want).max(), p
