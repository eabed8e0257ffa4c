"""The core of encoders: launches that are ended by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from calstack.devices.base import Completion, LaneInput, LaneOutput
from calstack.engine.encode import EncodeCore
from calstack.engine.options import EngineOptions
from calstack.engine.result import StepResult
from calstack.errors import CalstackError, DeviceError, DeviceNeedsReset
from calstack.runtime.facts import CalbinFacts, SubmodelFacts
from calstack.runtime.plan import DeviceWasReset, LaunchDone, LaunchPlan
from calstack.specs import Role, SamplingParams
from calstack.wire import Cancel, Drain, Encode, Encoded, Submit


def facts(batch: int = 4, rows: int = 32, context: int = 16) -> CalbinFacts:
    key = f"encode.b{batch}.q{context}.c{context}.none"
    one = SubmodelFacts(key=key, role=Role.ENCODE, batch=batch, q_len=context, context=context, rows=rows, kv="none")
    return CalbinFacts(
        name="small",
        submodels=(one,),
        max_tokens_per_launch=rows,
        late_inputs=False,
        block_positions=64,
        bytes_per_block=0,
        vocab=97,
        model_context=context,
        encoder=True,
        types=2,
    )


def answer(lane: LaneInput) -> LaneOutput:
    """What a text gives by itself: its ids' sum, their number, its segments' sum."""
    assert isinstance(lane.tokens, tuple)
    values = np.array([sum(lane.tokens), len(lane.tokens), sum(lane.types)], np.float32)
    return LaneOutput(token=-1, logprob=math.nan, top_ids=(), top_logprobs=(), logits=None, embedding=values)


class Bench:
    """Steps a core and plays the device."""

    def __init__(self, core: EncodeCore) -> None:
        self.core, self.now = core, 1_000
        self.waiting: list[LaunchPlan] = []
        self.launched: list[LaunchPlan] = []
        self.ends: dict[str, Encoded] = {}

    def step(self, *events: object) -> StepResult:
        self.now += 1_000_000
        result = self.core.step(self.now, events)  # type: ignore[arg-type]
        self.waiting += result.launches
        self.launched += result.launches
        for one in result.encoded:
            assert one.request not in self.ends, "one end each"
            self.ends[one.request] = one
        return result

    def finish(self, outputs: Sequence[LaneOutput] | None = None, error: DeviceError | None = None) -> StepResult:
        """End the oldest launch."""
        plan = self.waiting.pop(0)
        lanes = tuple(outputs if outputs is not None else map(answer, plan.lanes))
        now, end = self.now, self.now + 500
        done = Completion(
            plan.id, lanes, submitted_ns=now, started_ns=now, finished_ns=end, h2d_ns=0, infer_ns=500, d2h_ns=0, h2d_bytes=0, d2h_bytes=0
        )
        return self.step(LaunchDone(plan.id, None if error else done, error))

    def run(self) -> None:
        """Until nothing is left."""
        while self.waiting:
            self.finish()
        assert self.core.idle

    def vectors(self, request: str) -> list[list[float]]:
        return [np.frombuffer(one, "<f4").tolist() for one in self.ends[request].embeddings]


def bench(**options: int) -> Bench:
    return Bench(EncodeCore(facts(), options=EngineOptions(**options)))  # type: ignore[arg-type]


def wanted(texts: Sequence[Sequence[int]]) -> list[list[float]]:
    return [[float(sum(text)), float(len(text)), 0.0] for text in texts]


def test_texts_come_back_in_their_order() -> None:
    texts = tuple(tuple(range(n)) for n in (3, 16, 1, 9, 16, 16, 5))
    b = bench()
    b.step(Encode(request="a", texts=texts))
    b.run()
    assert b.vectors("a") == wanted(texts)


def test_texts_of_several_requests_share_a_launch_and_a_long_list_holds_nobody_up() -> None:
    b = bench(depth=1)
    b.step(Encode(request="long", texts=((1, 2, 3),) * 40), Encode(request="short", texts=((4, 5),)))
    assert len(b.launched[0].lanes) == 4
    b.finish()
    assert b.vectors("short") == wanted([(4, 5)])
    assert "long" not in b.ends
    b.run()
    assert len(b.vectors("long")) == 40


def test_launches_keep_the_bounds_of_the_submodel_and_are_filled() -> None:
    rng = np.random.default_rng(2)
    texts = tuple(tuple(range(int(n))) for n in rng.integers(1, 17, 60))
    b = bench()
    b.step(*(Encode(request=f"r{i}", texts=texts[i * 6 : i * 6 + 6]) for i in range(10)))
    b.run()
    for plan in b.launched:
        assert len(plan.lanes) <= 4
        assert sum(lane.cur_len for lane in plan.lanes) <= 32
    assert len(b.launched) <= 60 / 2
    assert [b.vectors(f"r{i}") for i in range(10)] == [wanted(texts[i * 6 : i * 6 + 6]) for i in range(10)]


def test_the_second_segment_begins_where_it_is_said() -> None:
    b = bench()
    b.step(Encode(request="a", texts=((1, 2, 3), (4, 5)), second=(1, 0)))
    b.run()
    assert b.vectors("a") == [[6.0, 3.0, 2.0], [9.0, 2.0, 0.0]]


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (Encode(request="x", texts=()), "RequestError"),
        (Encode(request="x", texts=((),)), "RequestError"),
        (Encode(request="x", texts=((97,),)), "RequestError"),
        (Encode(request="x", texts=((-1,),)), "RequestError"),
        (Encode(request="x", texts=((1,) * 17,)), "ContextSizeError"),
        (Encode(request="x", texts=((1, 2),), second=(2,)), "RequestError"),
        (Encode(request="x", texts=((1, 2),), second=(1, 1)), "RequestError"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(message: Encode, kind: str) -> None:
    b = bench()
    b.step(message)
    error = b.ends["x"].error
    assert error is not None
    assert error.kind == kind
    assert b.core.idle


def test_a_full_queue_and_a_draining_engine_refuse() -> None:
    b = bench(max_queued_requests=1)
    b.step(Encode(request="a", texts=((1,),)), Encode(request="b", texts=((1,),)))
    assert b.ends["b"].error is not None
    assert b.ends["b"].error.kind == "OverloadedError"
    b.step(Drain(), Encode(request="c", texts=((1,),)))
    assert b.ends["c"].error is not None
    assert b.ends["c"].error.kind == "UnavailableError"
    b.run()
    assert b.vectors("a") == wanted([(1,)])


def test_a_request_to_generate_is_refused() -> None:
    result = bench().step(Submit(request="a", prompt=(1,), max_tokens=1, sampling=SamplingParams(), seed=0))
    assert result.tokens[0].finish is not None
    assert result.tokens[0].finish.error is not None
    assert result.tokens[0].finish.error.kind == "NotInCalbin"


def test_a_cancelled_request_is_forgotten_with_what_it_had_in_flight() -> None:
    b = bench(depth=1)
    b.step(Encode(request="a", texts=((1,) * 16,) * 9), Encode(request="b", texts=((2,),)))
    b.step(Cancel(request="a"))
    b.run()
    assert list(b.ends) == ["b"]
    assert b.core.counters["padding_rows"] > 0
    assert sum(len(plan.lanes) for plan in b.launched) < 9


def test_a_deadline_ends_a_waiting_request() -> None:
    b = bench(depth=1)
    b.step(Encode(request="a", texts=((1,) * 16,) * 9))
    result = b.step(Encode(request="b", texts=((1,) * 16,), deadline_ms=3))
    assert result.wake_ns is not None
    b.now = result.wake_ns
    b.step()
    assert b.ends["b"].error is not None
    assert b.ends["b"].error.kind == "DeadlineError"
    b.run()
    assert len(b.vectors("a")) == 9


def test_of_a_failed_launch_only_the_guilty_request_ends() -> None:
    b = bench()
    b.step(*(Encode(request=name, texts=((i, i),)) for i, name in enumerate("abc", 1)))
    b.finish(error=DeviceError("bad", where="x"))
    while b.waiting:
        guilty = b.waiting[0].lanes[0].tokens == (2, 2)
        assert len(b.waiting[0].lanes) == 1
        b.finish(error=DeviceError("bad", where="x") if guilty else None)
    assert {name: one.error is None for name, one in b.ends.items()} == {"a": True, "b": False, "c": True}
    assert b.core.idle


def test_numbers_that_are_none_are_an_error() -> None:
    b = bench()
    b.step(Encode(request="a", texts=((1,),)))
    nan = LaneOutput(-1, math.nan, (), (), None, embedding=np.array([np.nan], np.float32))
    b.finish([nan])
    assert b.ends["a"].error is not None


def test_a_reset_launches_again_what_was_lost_and_gives_up_in_the_end() -> None:
    b = bench(depth=2, max_restarts=2)
    texts = tuple((i,) * 10 for i in range(9))
    b.step(Encode(request="a", texts=texts))
    lost: CalstackError = DeviceNeedsReset("gone", where="x")
    for _ in range(2):
        b.waiting.clear()
        b.step(DeviceWasReset(lost))  # type: ignore[arg-type]
    b.run()
    assert b.vectors("a") == wanted(texts)
    b.step(Encode(request="b", texts=texts))
    for _ in range(3):
        b.waiting.clear()
        b.step(DeviceWasReset(lost))  # type: ignore[arg-type]
    assert b.ends["b"].error is not None
    assert b.ends["b"].error.kind == "UnavailableError"
    assert b.core.idle
