"""Two chips give the bits of one: every logit, however threads are shared, and although no chip can read the other's shard."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import numpy as np
import pytest

from calstack import api
from calstack.calbin.reader import open_calbin
from calstack.compiler import pipeline
from calstack.devices.base import Device, KVMove, KVMoveKind, LaneInput, LaneOutput, Launch, LogitRows, OpenOptions
from calstack.devices.registry import open_device
from calstack.errors import DeviceNeedsReset
from calstack.specs import DrawKey, KVDType, QuantSpec, SamplingParams, WeightFormat
from calstack.targets.spec import ChipSpec, TargetSpec, load_target
from tests.support.gguf_files import DATA

MODELS = ("tiny-llama", "tiny-qwen3", "tiny-qwen3-moe", "tiny-gemma3")
FORMATS = (WeightFormat.F32, WeightFormat.W4A8, WeightFormat.W8A8)
PROMPT = [int(i) for i in np.random.default_rng(7).integers(3, 150, 90)]

pytestmark = pytest.mark.native


def two_chips(name: str) -> TargetSpec:
    spec = load_target("cpu")
    assert name == "cpu"
    return msgspec.structs.replace(spec, chips=tuple(ChipSpec(id=i, dram_bytes=0, sram_bytes=0) for i in range(2)))


@dataclasses.dataclass(frozen=True)
class Pair:
    """The same model for one chip and for two."""

    one: Path
    two: Path


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, WeightFormat], Pair]:
    base = tmp_path_factory.mktemp("chips")
    found = {}
    for model in MODELS:
        for fmt in FORMATS:
            options = api.CompileOptions(quant=QuantSpec(default=fmt), kv_dtype=KVDType.BF16, batches=(1, 4), quality=False)
            one = api.compile_model(DATA / model, base / f"{model}.{fmt}.1.calbin", options=options)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(pipeline, "load_target", two_chips)
                two = api.compile_model(DATA / model, base / f"{model}.{fmt}.2.calbin", options=options)
            found[model, fmt] = Pair(one, two)
    return found


def outputs(device: Device, calbin: Path) -> tuple[np.ndarray, list[int]]:
    """Logits of every prompt position over two chunks, beside a second lane, then a sampled continuation."""
    submodels = open_calbin(calbin).manifest.submodels
    prefill, decode = (max((s for s in submodels if s.role == role), key=lambda s: -s.batch).key for role in ("prefill", "decode"))
    handle = device.load(calbin, kv_blocks=12)

    def run(key: str, *lanes: LaneInput) -> tuple[LaneOutput, ...]:
        done = device.wait(device.submit(Launch(handle, key, lanes)), 30)
        assert done is not None
        assert done.error is None, done.error
        return done.lanes

    rows = []
    for start, end in ((0, 70), (70, 90)):
        lane = LaneInput(past_len=start, cur_len=end - start, blocks=(5, 2, 7), tokens=PROMPT[start:end], logits=LogitRows.ALL)
        mate = LaneInput(past_len=start, cur_len=end - start, blocks=(1, 0, 9), tokens=PROMPT[start:end][::-1])
        logits = run(prefill, mate, lane)[1].logits
        assert logits is not None
        rows.append(logits)
    ids = [PROMPT[-1]]
    sampling = SamplingParams(temperature=0.9, top_k=40, repetition_penalty=1.1)
    for i in range(12):
        lane = LaneInput(
            past_len=89 + i,
            cur_len=1,
            blocks=(5, 2, 7),
            tokens=[ids[-1]],
            emit=True,
            sampling=sampling,
            draw=DrawKey(seed=3, index=i),
            prompt_history=PROMPT,
            output_history=ids[1:],
            top_logprobs=3,
        )
        ids.append(run(decode, lane)[0].token)
    device.unload(handle)
    return np.concatenate(rows), ids


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "options", [{"threads": 2}, {"threads": 1}, {"threads": 4}, {"isa": "portable"}, {"extra": (("isolate_chips", "1"),)}], ids=str
)
def test_two_chips_give_the_bits_of_one(pairs: dict[tuple[str, WeightFormat], Pair], model: str, fmt: WeightFormat, options: dict) -> None:
    pair = pairs[model, fmt]
    device = open_device("cpu", OpenOptions(**options))
    try:
        one, two = outputs(device, pair.one), outputs(device, pair.two)
    finally:
        device.close()
    assert one[0].tobytes() == two[0].tobytes()
    assert one[1] == two[1]
    assert len(set(one[1])) > 2


def test_each_chip_holds_its_own_shard_and_a_share_of_the_cache(pairs: dict[tuple[str, WeightFormat], Pair]) -> None:
    pair = pairs["tiny-qwen3", WeightFormat.W4A8]
    one, two = open_calbin(pair.one).manifest, open_calbin(pair.two).manifest
    assert [chip.params for chip in two.target.chips] == ["params/chip0.safetensors", "params/chip1.safetensors"]
    assert sum(chip.kv_bytes_per_block for chip in two.target.chips) == one.kv.bytes_per_block == two.kv.bytes_per_block
    assert all(chip.params_bytes < one.target.chips[0].params_bytes for chip in two.target.chips)


def test_saved_blocks_hold_every_chips_part(pairs: dict[tuple[str, WeightFormat], Pair]) -> None:
    pair = pairs["tiny-qwen3", WeightFormat.W4A8]
    device = open_device("cpu", OpenOptions(threads=2))
    handle = device.load(pair.two, kv_blocks=6)
    manifest = open_calbin(pair.two).manifest
    prefill = next(s.key for s in manifest.submodels if s.role == "prefill")
    decode = next(s.key for s in manifest.submodels if s.role == "decode" and s.batch == 1)

    def run(key: str, lane: LaneInput) -> bytes:
        done = device.wait(device.submit(Launch(handle, key, (lane,))), 30)
        assert done is not None
        assert done.error is None
        logits = done.lanes[0].logits
        assert logits is not None
        return logits.tobytes()

    run(prefill, LaneInput(past_len=0, cur_len=60, blocks=(0,), tokens=PROMPT[:60], logits=LogitRows.LAST))
    want = run(decode, LaneInput(past_len=60, cur_len=1, blocks=(0,), tokens=PROMPT[60:61], logits=LogitRows.LAST))
    (saved,) = device.kv_move(handle, [KVMove(KVMoveKind.SAVE, src=0)])
    assert len(saved) == manifest.kv.bytes_per_block
    device.kv_move(handle, [KVMove(KVMoveKind.CLEAR, dst=0), KVMove(KVMoveKind.RESTORE, dst=3, data=saved)])
    assert run(decode, LaneInput(past_len=60, cur_len=1, blocks=(3,), tokens=PROMPT[60:61], logits=LogitRows.LAST)) == want
    device.kv_move(handle, [KVMove(KVMoveKind.COPY, src=3, dst=4)])
    assert run(decode, LaneInput(past_len=60, cur_len=1, blocks=(4,), tokens=PROMPT[60:61], logits=LogitRows.LAST)) == want
    device.close()


def test_a_reset_ends_launches_on_every_chip_and_the_device_goes_on(pairs: dict[tuple[str, WeightFormat], Pair]) -> None:
    pair = pairs["tiny-llama", WeightFormat.F32]
    device = open_device("cpu", OpenOptions(threads=2))
    handle = device.load(pair.two, kv_blocks=12)
    key = next(s.key for s in open_calbin(pair.two).manifest.submodels if s.role == "prefill")
    lane = LaneInput(past_len=0, cur_len=90, blocks=(5, 2), tokens=PROMPT, logits=LogitRows.ALL)
    for _ in range(5):
        tickets = [device.submit(Launch(handle, key, (lane,))) for _ in range(3)]
        device.reset()
        ended = [device.wait(ticket, 30) for ticket in tickets]
        assert all(done is not None and (done.error is None or isinstance(done.error, DeviceNeedsReset)) for done in ended)
    device.unload(handle)
    assert outputs(device, pair.two)[1] == outputs(device, pair.one)[1]
    device.close()
