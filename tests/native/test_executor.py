"""Programs on the executor: against numpy in f64, and the same bits on every instruction set, thread count and cut of the rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from calstack.devices.base import Device, LaneInput, Launch, LogitRows, OpenOptions
from calstack.devices.registry import open_device
from calstack.specs import KVDType, SamplingParams
from tests.support.tiny_calbin import Tiny, forward, write_tiny

pytestmark = pytest.mark.native

GREEDY = SamplingParams(temperature=0.0)
TINY = {kv: Tiny(kv=kv, prefill_rows=160) for kv in KVDType}
TOKENS = [int(t) for t in np.random.default_rng(5).integers(0, 160, 2200)]
BLOCKS = range(36)


@pytest.fixture(scope="module", params=list(KVDType))
def tiny(request: pytest.FixtureRequest) -> Tiny:
    return TINY[request.param]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, tiny: Tiny) -> Path:
    return write_tiny(tmp_path_factory.mktemp("executor") / "tiny.calbin", tiny)


class Session:
    """One loaded calbin; lane i owns blocks 36 i to 36 i + 35."""

    def __init__(self, device: Device, path: Path, tiny: Tiny) -> None:
        self.device, self.tiny = device, tiny
        self.handle = device.load(path, kv_blocks=36 * 4)

    def logits(self, *spans: tuple[int, int], tokens: Sequence[int] = TOKENS) -> list[np.ndarray]:
        """All logits of lane i at positions spans[i] = (start, stop)."""
        lanes = tuple(
            LaneInput(past_len=a, cur_len=b - a, blocks=range(36 * i, 36 * i + 36), tokens=tokens[a:b], logits=LogitRows.ALL)
            for i, (a, b) in enumerate(spans)
        )
        one = all(b - a <= 1 for a, b in spans)
        done = self.device.wait(self.device.submit(Launch(self.handle, self.tiny.decode if one else self.tiny.prefill, lanes)), 60)
        assert done is not None
        assert done.error is None, done.error
        return [lane.logits for lane in done.lanes if lane.logits is not None]

    def fill(self, stop: int) -> None:
        """Positions 0..stop-1 of lane 0."""
        for start in range(0, stop, self.tiny.prefill_rows):
            self.logits((start, min(start + self.tiny.prefill_rows, stop)))


@pytest.fixture
def session(path: Path, tiny: Tiny) -> Iterator[Session]:
    device = open_device("cpu", OpenOptions(strict=True))
    yield Session(device, path, tiny)
    device.close()


def with_device(path: Path, tiny: Tiny, isa: str, threads: int) -> Session:
    return Session(open_device("cpu", OpenOptions(isa=isa, threads=threads)), path, tiny)


def isas() -> list[str]:
    from calstack.errors import UsageError

    found = []
    for isa in ("reference", "portable", "avx2", "avx2_vnni", "avx512_vnni", "avx512_bf16"):
        try:
            open_device("cpu", OpenOptions(isa=isa)).close()
        except UsageError:
            continue
        found.append(isa)
    return found


def test_logits_equal_the_decoder_in_numpy(session: Session) -> None:
    got = np.concatenate([session.logits((a, b))[0] for a, b in ((0, 100), (100, 101), (101, 180))])
    want = forward(session.tiny, TOKENS[:180])
    limit = {KVDType.F32: 1e-4, KVDType.BF16: 2e-2}.get(session.tiny.kv, 8e-2)
    assert np.abs(got - want).max() <= limit * np.abs(want).max()


def test_logits_given_back_are_capped_once(tmp_path: Path) -> None:
    tiny = Tiny(logit_softcap=2.0)
    session = Session(open_device("cpu", OpenOptions()), write_tiny(tmp_path / "cap.calbin", tiny), tiny)
    want = forward(tiny, TOKENS[:20])
    assert np.abs(session.logits((0, 20))[0] - want).max() <= 1e-4
    lane = LaneInput(
        past_len=0, cur_len=20, blocks=(0,), tokens=TOKENS[:20], emit=True, sampling=GREEDY, top_logprobs=1, logits=LogitRows.LAST
    )
    done = session.device.wait(session.device.submit(Launch(session.handle, tiny.prefill, (lane,))), 10)
    assert done is not None
    assert done.lanes[0].logits is not None
    row = done.lanes[0].logits[0].astype(np.float64)
    assert done.lanes[0].logprob == pytest.approx(row.max() - np.log(np.exp(row).sum()), abs=1e-5)
    session.device.close()


def test_more_than_64_rows_of_logits_equal_rows_asked_for_one_by_one(session: Session) -> None:
    whole = session.logits((0, 150))[0]
    session.logits((0, 149))
    assert np.array_equal(session.logits((149, 150))[0][0], whole[149])
    assert np.array_equal(whole[:70], session.logits((0, 70))[0])


@pytest.mark.parametrize("depth", [63, 64, 1023, 1024, 2100])
def test_decode_has_the_bits_of_prefill_at_any_depth(session: Session, depth: int) -> None:
    """Beyond 1,024 positions decode attends in splits, prefill does not."""
    session.fill(depth)
    decoded = session.logits((depth, depth + 1))[0]
    prefilled = session.logits((depth, depth + 2))[0]
    assert np.array_equal(decoded[0], prefilled[0])


def test_lanes_of_one_launch_have_the_bits_of_each_alone(session: Session) -> None:
    alone = [session.logits((0, n))[0] for n in (40, 1, 77)]
    together = session.logits((0, 40), (0, 1), (0, 77))
    assert all(np.array_equal(a, b) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("start", [20, 62])  # the second crosses into a new block
def test_lanes_over_the_same_blocks_see_each_other_s_keys(session: Session, start: int) -> None:
    session.fill(start)
    want = session.logits((start, start + 4))[0]
    for _ in range(30):
        session.fill(start)
        session.logits((start, start + 4), tokens=TOKENS[500:])  # other keys where the lanes write theirs
        lanes = tuple(
            LaneInput(past_len=p, cur_len=1, blocks=range(36), tokens=TOKENS[p : p + 1], logits=LogitRows.ALL)
            for p in range(start, start + 4)
        )
        done = session.device.wait(session.device.submit(Launch(session.handle, session.tiny.decode, lanes)), 60)
        assert done is not None
        for row, lane in zip(want, done.lanes, strict=True):
            assert lane.logits is not None
            np.testing.assert_array_equal(lane.logits[0], row)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_bits_do_not_depend_on_instruction_set_or_threads(session: Session, path: Path, tiny: Tiny, isa: str, threads: int) -> None:
    other = with_device(path, tiny, isa, threads)
    try:
        for step in ((0, 130), (130, 131), (131, 200)):
            assert np.array_equal(session.logits(step)[0], other.logits(step)[0])
    finally:
        other.device.close()


def test_a_nan_in_strict_mode_names_the_lane(tmp_path: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support import tiny_calbin

    real = tiny_calbin.weights

    def broken(t: Tiny) -> dict[str, np.ndarray]:
        params = real(t)
        params["embed"][7] = np.nan
        return params

    monkeypatch.setattr(tiny_calbin, "weights", broken)
    device = open_device("cpu", OpenOptions(strict=True))
    session = Session(device, tiny_calbin.write_tiny(tmp_path / "nan.calbin", tiny), tiny)
    lanes = tuple(LaneInput(past_len=0, cur_len=1, blocks=(i,), tokens=(t,), emit=True, sampling=GREEDY) for i, t in enumerate((3, 7, 3)))
    done = device.wait(device.submit(Launch(session.handle, tiny.decode, lanes)), 10)
    assert done is not None
    assert "lane 1" in str(done.error)
    device.close()
