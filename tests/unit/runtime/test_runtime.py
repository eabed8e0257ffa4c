"""The runtime over the fake device: order, retry, reset, and what it gives back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from calstack.clock import VirtualClock
from calstack.devices.base import LaneInput, TokenFrom
from calstack.errors import DeviceError, DeviceFatal, DeviceNeedsReset, DeviceRetryable
from calstack.runtime.plan import DeviceWasReset, LaunchDone, LaunchPlan
from calstack.runtime.runtime import Runtime, RuntimeOptions
from calstack.specs import SamplingParams
from tests.support.facts import small_facts
from tests.support.fake_device import FakeDevice, alone

GREEDY = SamplingParams(temperature=0.0)
PENALISED = SamplingParams(temperature=0.0, repetition_penalty=1.5)


class Rig:
    def __init__(self, options: RuntimeOptions | None = None) -> None:
        self.clock = VirtualClock()
        self.device = FakeDevice(small_facts(), self.clock, queue_depth=3)
        self.runtime = Runtime(self.device, Path("none"), small_facts(), kv_blocks=8, options=options, clock=self.clock)
        self.past = 0

    def plan(self, id_: int, tokens: Sequence[int] | TokenFrom, sampling: SamplingParams = GREEDY, history: tuple[int, ...] = ()) -> None:
        count = 1 if isinstance(tokens, TokenFrom) else len(tokens)
        prompt = (1, 2, 3) if sampling.needs_history else ()
        lane = LaneInput(
            past_len=self.past, cur_len=count, blocks=(0, 1), tokens=tokens, emit=True, sampling=sampling,
            prompt_history=prompt, output_history=history,
        )  # fmt: skip
        self.past += count
        self.runtime.submit(LaunchPlan(id_, "prefill.b4.q32.c96.paged" if count > 1 else "decode.b1.q1.c96.paged", (lane,)))

    def ends(self, ms: int = 100) -> list[LaunchDone | DeviceWasReset]:
        found: list[LaunchDone | DeviceWasReset] = []
        for _ in range(ms):
            found += self.runtime.collect()
            self.clock.advance(1_000_000)
        return found


def tokens(ends: list[LaunchDone | DeviceWasReset]) -> list[int]:
    return [e.completion.lanes[0].token for e in ends if isinstance(e, LaunchDone) and e.completion is not None]


def test_ends_come_in_plan_order_with_tokens_passed_on_the_device() -> None:
    rig = Rig()
    rig.plan(0, (1, 2, 3))
    rig.plan(1, TokenFrom(0, 0))
    rig.plan(2, TokenFrom(1, 0))
    assert tokens(rig.ends()) == alone((1, 2, 3), GREEDY, 0, 0, 3, 97)


def test_a_full_device_queue_holds_plans_back_until_there_is_room() -> None:
    rig = Rig()
    rig.plan(0, (1, 2, 3))
    for i in range(1, 6):
        rig.plan(i, TokenFrom(i - 1, 0))
    assert rig.device.max_pending == 3
    assert tokens(rig.ends()) == alone((1, 2, 3), GREEDY, 0, 0, 6, 97)


@pytest.mark.parametrize("where", [0, 1, 2])
def test_a_retryable_end_runs_it_and_all_behind_again_with_equal_ids(where: int) -> None:
    rig = Rig()
    rig.device.faults.extend([None] * where + [DeviceRetryable("flaky")])
    rig.plan(0, (1, 2, 3), PENALISED)
    out = alone((1, 2, 3), PENALISED, 0, 0, 3, 97)
    rig.plan(1, TokenFrom(0, 0), PENALISED)
    rig.plan(2, TokenFrom(1, 0), PENALISED, history=(out[0],))
    assert tokens(rig.ends()) == out
    assert rig.runtime.retries == 1


def test_retries_back_off_and_end_with_the_error() -> None:
    rig = Rig(RuntimeOptions(attempts=3, backoff_ms=10))
    rig.device.submit_faults.extend([DeviceRetryable("busy")] * 5)
    rig.plan(0, (1, 2, 3))
    assert rig.runtime.wake_ns == 10_000_000
    ends = rig.ends()
    assert [type(e.error) for e in ends if isinstance(e, LaunchDone)] == [DeviceRetryable]
    assert len(rig.device.submit_faults) == 2


def test_a_launch_refused_at_submit_ends_with_its_error_and_so_do_its_followers() -> None:
    rig = Rig()
    rig.device.submit_faults.append(DeviceError("out of bounds"))
    rig.plan(0, (1, 2, 3))
    rig.plan(1, TokenFrom(0, 0))
    ends = rig.ends()
    assert [e.error is not None for e in ends if isinstance(e, LaunchDone)] == [True, True]


def test_a_reset_loses_all_launches_and_is_reported_once() -> None:
    rig = Rig()
    rig.device.faults.append(DeviceNeedsReset("stuck"))
    rig.plan(0, (1, 2, 3))
    rig.plan(1, TokenFrom(0, 0))
    ends = rig.ends()
    assert [type(e) for e in ends] == [DeviceWasReset]
    assert rig.runtime.in_flight == 0
    assert rig.device.resets == 1


def test_a_fatal_end_is_raised() -> None:
    rig = Rig()
    rig.device.faults.append(DeviceFatal("gone"))
    rig.plan(0, (1, 2, 3))
    with pytest.raises(DeviceFatal):
        rig.ends()


def test_the_recorder_keeps_the_last_attempts() -> None:
    rig = Rig(RuntimeOptions(recorder_size=2))
    rig.device.faults.append(DeviceRetryable("flaky"))
    rig.plan(0, (1, 2, 3))
    rig.ends()
    rig.plan(1, (5,))
    rig.ends()
    records = rig.runtime.recorder.records()
    assert [(r.plan.id, r.attempt) for r in records] == [(0, 2), (1, 1)]


def test_the_recorder_gives_lanes_with_the_ids_they_took_from_the_device() -> None:
    rig = Rig()
    rig.plan(0, (1, 2, 3))
    rig.plan(1, TokenFrom(0, 0))
    rig.ends()
    first, second = rig.runtime.recorder.records()
    assert first.completion is not None
    assert second.plan.lanes[0].tokens == (first.completion.lanes[0].token,)


def test_wait_returns_when_the_oldest_launch_has_ended() -> None:
    rig = Rig()
    rig.plan(0, (1, 2, 3))
    rig.runtime.wait(1.0)
    assert rig.runtime.has_events
    assert len(rig.runtime.collect()) == 1


def test_close_leaves_nothing_in_flight() -> None:
    rig = Rig()
    rig.plan(0, (1, 2, 3))
    rig.plan(1, TokenFrom(0, 0))
    rig.runtime.close()
    assert not rig.device._queue
