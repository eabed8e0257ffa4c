"""The core over the fake device: one behaviour of a request's life each."""

from __future__ import annotations

import pytest

from calstack.engine.options import EngineOptions
from calstack.errors import DeviceFatal, DeviceNeedsReset, DeviceRetryable
from calstack.specs import SamplingParams
from calstack.wire import Cancel, Drain
from tests.support.facts import small_facts
from tests.support.harness import Harness

SEEDED = SamplingParams(temperature=0.8, top_k=40)
PENALISED = SamplingParams(temperature=0.9, repetition_penalty=1.2)


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0), SEEDED, PENALISED])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_one_request_gets_its_tokens_and_ends_with_length(sampling: SamplingParams, depth: int) -> None:
    h = Harness(small_facts(), options=EngineOptions(depth=depth))
    h.run(h.submit("a", prompt=tuple(range(20)), max_tokens=12, sampling=sampling))
    assert h.ids["a"] == h.alone("a")
    assert h.ends["a"].reason == "length"
    usage = h.ends["a"].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.output_tokens) == (20, 12)


def test_nothing_is_computed_past_max_tokens() -> None:
    h = Harness(small_facts())
    h.run(h.submit("a", max_tokens=10))
    assert h.core.counters["decode_rows"] == 9
    assert h.core.counters["padding_rows"] == 0


def test_two_launches_are_in_flight_at_depth_two() -> None:
    h = Harness(small_facts())
    h.run(h.submit("a", max_tokens=10))
    assert h.device.max_pending == 2


def test_many_requests_get_what_each_gets_alone() -> None:
    h = Harness(small_facts())
    batch = [
        h.submit(f"r{i}", prompt=tuple(range(i, i + 5 + 3 * i)), max_tokens=5 + i, sampling=[SEEDED, PENALISED][i % 2], seed=i)
        for i in range(20)
    ]
    h.run(*batch)
    assert {n: h.ids[n] for n in h.ids} == {n: h.alone(n) for n in h.ids}


def test_a_stop_id_ends_the_request_and_is_not_delivered() -> None:
    h = Harness(small_facts())
    full = h.submit("a", max_tokens=10)
    expected = h.alone("a")
    h.run(h.submit("a", max_tokens=10, stop_ids=(expected[4],)))
    assert full.request == "a"
    assert h.ids["a"] == expected[: expected.index(expected[4])]
    assert (h.ends["a"].reason, h.ends["a"].stop_id) == ("stop", expected[4])


def test_eos_ends_the_request_unless_ignored() -> None:
    h = Harness(small_facts())
    h.submit("a", max_tokens=10)
    eos = h.alone("a")[3]
    h = Harness(small_facts(eos=(eos,)))
    h.run(h.submit("a", max_tokens=10), h.submit("b", max_tokens=10, ignore_eos=True))
    assert h.ends["a"].reason == "stop"
    assert h.ids["b"] == h.alone("b")


def test_the_context_ends_a_request_with_length() -> None:
    h = Harness(small_facts(context=32))
    h.run(h.submit("a", prompt=tuple(range(25)), max_tokens=100))
    assert len(h.ids["a"]) == 7
    assert h.ends["a"].reason == "length"


def test_few_blocks_bound_the_context() -> None:
    h = Harness(small_facts(context=96, block=8), kv_blocks=4)
    h.run(h.submit("a", prompt=tuple(range(25)), max_tokens=100), h.submit("b", prompt=tuple(range(32))))
    assert len(h.ids["a"]) == 7
    assert h.ends["b"].error is not None
    assert h.ends["b"].error.kind == "ContextSizeError"


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"prompt": ()}, "RequestError"),
        ({"prompt": (1000,)}, "RequestError"),
        ({"max_tokens": 0}, "RequestError"),
        ({"seed": -1}, "RequestError"),
        ({"sampling": SamplingParams(temperature=-1.0)}, "RequestError"),
        ({"prompt": tuple(range(96))}, "ContextSizeError"),
        ({"adapter": 1}, "NotInCalbin"),
        ({"overflow": "shift", "prompt": (1,) * 60, "keep": 60}, "RequestError"),
        ({"overflow": "shift", "prompt_logprobs": 0}, "RequestError"),
        ({"top_logprobs": 1000}, "RequestError"),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_kind(change: dict[str, object], kind: str) -> None:
    h = Harness(small_facts())
    h.run(h.submit("a", **change))  # type: ignore[arg-type]
    end = h.ends["a"]
    assert end.reason == "error"
    assert end.error is not None
    assert end.error.kind == kind
    assert not h.device.launches


def test_the_queue_is_bounded_in_requests_and_says_when_to_come_back() -> None:
    h = Harness(small_facts(batches=(1, 2)), options=EngineOptions(max_queued_requests=3))
    h.run(*[h.submit(f"r{i}") for i in range(8)])
    refused = [e.error for e in h.ends.values() if e.reason == "error"]
    assert len(refused) == 3
    assert all(e is not None and e.kind == "OverloadedError" and e.retry_after >= 1.0 for e in refused)
    assert sum(e.reason == "length" for e in h.ends.values()) == 5


def test_the_queue_is_bounded_in_tokens() -> None:
    h = Harness(small_facts(batches=(1,)), options=EngineOptions(max_queued_tokens=30))
    h.run(*[h.submit(f"r{i}", prompt=tuple(range(20))) for i in range(4)])
    assert sorted(e.reason for e in h.ends.values()) == ["error", "error", "length", "length"]


def test_cancel_ends_a_request_wherever_it_is() -> None:
    h = Harness(small_facts(batches=(1,)))
    h.turn(h.submit("prefill", prompt=tuple(range(40))), h.submit("queued"))
    h.turn(Cancel(request="queued"), Cancel(request="unknown"))
    h.turn(Cancel(request="prefill"))
    h.turn(h.submit("decode", max_tokens=50))
    for _ in range(8):
        h.tick()
    h.run(Cancel(request="decode"), Cancel(request="decode"))
    assert [h.ends[n].reason for n in ("queued", "prefill", "decode")] == ["cancelled"] * 3
    assert 0 < len(h.ids["decode"]) < 50


def test_a_deadline_ends_a_request_with_an_error() -> None:
    h = Harness(small_facts())
    h.run(h.submit("a", max_tokens=60, deadline_ms=20), h.submit("b", max_tokens=60))
    assert h.ends["a"].error is not None
    assert h.ends["a"].error.kind == "DeadlineError"
    assert h.ids["a"] == h.alone("a")[: len(h.ids["a"])]
    assert h.ends["b"].reason == "length"


def test_lower_priority_values_run_first() -> None:
    h = Harness(small_facts(batches=(1,)))
    h.run(h.submit("first"), h.submit("late", priority=5), h.submit("urgent", priority=-1))
    assert list(h.ends) == ["first", "urgent", "late"]


def test_block_shortage_preempts_the_youngest_and_changes_no_token() -> None:
    h = Harness(small_facts(), kv_blocks=13)
    h.run(*[h.submit(f"r{i}", prompt=tuple(range(i, i + 15)), max_tokens=60, sampling=SEEDED, seed=i) for i in range(4)])
    assert h.core.counters["preemptions"] > 0
    assert next(iter(h.ends)) == "r0"
    assert {n: h.ids[n] for n in h.ids} == {n: h.alone(n) for n in h.ids}


def test_the_end_of_a_launch_from_before_a_preemption_is_discarded() -> None:
    h = Harness(small_facts(), options=EngineOptions(prefix_cache=False))
    h.turn(h.submit("a", prompt=tuple(range(9)), max_tokens=12))
    h.core.lanes.requeue(h.core.running[0])
    h.run()
    assert h.ids["a"] == h.alone("a")
    assert h.core.counters["padding_rows"] >= 9


def test_a_request_alone_runs_without_mates() -> None:
    h = Harness(small_facts())
    h.run(h.submit("a", max_tokens=20), h.submit("poison", max_tokens=20, alone=True), h.submit("b", max_tokens=20))
    assert all(len(launch.lanes) == 1 for launch in h.device.launches)
    assert list(h.ends) == ["a", "poison", "b"]


def test_resume_goes_on_after_the_ids_delivered_before() -> None:
    h = Harness(small_facts())
    h.submit("a", prompt=tuple(range(9)), max_tokens=30, sampling=PENALISED)
    expected = h.alone("a")
    h.run(h.submit("a", prompt=tuple(range(9)), max_tokens=30, sampling=PENALISED, output=tuple(expected[:11])))
    assert h.ids["a"] == expected


def test_a_shared_prefix_is_taken_from_the_cache() -> None:
    h = Harness(small_facts())
    prompt = tuple(range(40))
    h.run(h.submit("cold", prompt=prompt))
    h.run(
        h.submit("warm", prompt=(*prompt, 3)),
        h.submit("salted", prompt=prompt, cache_salt="x"),
        h.submit("off", prompt=prompt, cache_prompt=False),
    )
    cached = {n: h.ends[n].usage.cached_tokens for n in h.ends}  # type: ignore[union-attr]
    assert cached == {"cold": 0, "warm": 40, "salted": 0, "off": 0}
    assert {n: h.ids[n] for n in h.ids} == {n: h.alone(n) for n in h.ids}


def test_a_repeated_prompt_computes_at_least_its_last_token() -> None:
    h = Harness(small_facts())
    prompt = tuple(range(40))
    h.run(h.submit("a", prompt=prompt))
    h.run(h.submit("b", prompt=prompt))
    assert h.ends["b"].usage is not None
    assert h.ends["b"].usage.cached_tokens == 32
    assert h.ids["b"] == h.ids["a"]


def test_the_prefix_cache_keeps_to_its_limit() -> None:
    h = Harness(small_facts(), options=EngineOptions(prefix_cache_bytes=3 * 1024))
    for i in range(5):
        h.run(h.submit(f"r{i}", prompt=tuple(range(i, i + 40))))
    assert h.core.pool.available == h.core.pool.total
    h.run(h.submit("again", prompt=tuple(range(4, 44))))
    assert h.ends["again"].usage is not None
    assert h.ends["again"].usage.cached_tokens == 24


def test_drain_refuses_new_work_and_finishes_what_runs() -> None:
    h = Harness(small_facts())
    h.turn(h.submit("a"))
    h.run(Drain(), h.submit("b"))
    assert h.ends["a"].reason == "length"
    assert h.ends["b"].error is not None
    assert h.ends["b"].error.kind == "UnavailableError"


def test_a_retryable_launch_is_run_again_with_those_behind_it() -> None:
    h = Harness(small_facts())
    h.device.faults.extend([None, None, DeviceRetryable("flaky"), None, None, DeviceRetryable("flaky"), None, DeviceRetryable("flaky")])
    h.run(h.submit("a", max_tokens=20), h.submit("b", prompt=(4, 5), max_tokens=20, sampling=PENALISED))
    assert h.runtime.retries >= 2
    assert {n: h.ids[n] for n in h.ids} == {n: h.alone(n) for n in h.ids}


def test_a_launch_that_never_succeeds_ends_its_requests_only() -> None:
    h = Harness(small_facts())
    h.turn(h.submit("a"))
    h.device.faults.extend([DeviceRetryable("broken")] * 7)
    h.run()
    h.device.faults.clear()
    h.run(h.submit("b"))
    assert h.ends["a"].error is not None
    assert h.ends["a"].error.kind == "DeviceRetryable"
    assert h.ids["b"] == h.alone("b")


def test_a_poisonous_request_ends_alone() -> None:
    h = Harness(small_facts())
    h.device.poison = 90
    h.run(*[h.submit(f"r{i}", prompt=(i, i + 1, 90 if i == 2 else 80), max_tokens=12, seed=i) for i in range(4)])
    assert {n: e.reason for n, e in h.ends.items()} == {"r0": "length", "r1": "length", "r2": "error", "r3": "length"}
    assert all(h.ids[n] == h.alone(n) for n in ("r0", "r1", "r3"))


def test_a_reset_recomputes_running_requests_with_the_same_tokens() -> None:
    h = Harness(small_facts())
    h.device.faults.extend([None] * 6 + [DeviceNeedsReset("stuck")])
    names = [h.submit(f"r{i}", prompt=tuple(range(i, i + 12)), max_tokens=20, sampling=PENALISED, seed=i) for i in range(5)]
    h.run(*names)
    assert h.device.resets == 1
    assert {n: h.ids[n] for n in h.ids} == {n: h.alone(n) for n in h.ids}


def test_resets_that_do_not_help_are_fatal() -> None:
    h = Harness(small_facts())
    h.device.faults.extend([DeviceNeedsReset("stuck")] * 10)
    with pytest.raises(DeviceFatal):
        h.run(h.submit("a"))


def test_a_launch_that_does_not_end_is_fatal_after_the_timeout() -> None:
    h = Harness(small_facts(), options=EngineOptions(launch_timeout_s=2.0))
    h.device.base_ns = 10**15
    h.turn(h.submit("a"))
    h.clock.advance(1_900_000_000)
    h.turn()
    h.clock.advance(200_000_000)
    with pytest.raises(DeviceFatal, match="no launch ended"):
        h.turn()


def test_logprobs_come_with_each_id_when_asked() -> None:
    h = Harness(small_facts())
    h.run(h.submit("a", max_tokens=5, top_logprobs=2), h.submit("b", max_tokens=5))
    assert len(h.logprobs["a"]) == 5
    assert h.logprobs["a"][0].top_ids == (0, 1)
    assert not h.logprobs["b"]


def test_prefill_and_decode_take_turns() -> None:
    h = Harness(small_facts(rows=16), options=EngineOptions(prefill_chunk=4, depth=1))
    h.turn(h.submit("stream", max_tokens=60))
    for _ in range(6):
        h.tick(2_000_000)
    before = len(h.device.launches)
    h.run(h.submit("long", prompt=tuple(range(80)), max_tokens=2))
    kinds = [launch.submodel.split(".")[0] for launch in h.device.launches[before : before + 20]]
    assert "prefill.prefill" not in ".".join(kinds)
    assert kinds.count("prefill") >= 9


def test_the_inter_token_target_bounds_prefill_beside_streams() -> None:
    h = Harness(small_facts(rows=32), options=EngineOptions(itl_target_ms=4.0, min_chunk=2, depth=1))
    h.turn(h.submit("stream", max_tokens=80))
    for _ in range(6):
        h.tick(2_000_000)
    before = len(h.device.launches)
    h.run(h.submit("long", prompt=tuple(range(80)), max_tokens=2))
    rows = [launch.lanes[0].cur_len for launch in h.device.launches[before:] if launch.submodel.startswith("prefill")]
    assert max(rows) < 32
    assert sum(rows) == 80


def test_padding_counts_tokens_computed_past_an_end() -> None:
    h = Harness(small_facts())
    h.submit("a", max_tokens=10)
    stop = h.alone("a")[4]
    h.run(h.submit("a", max_tokens=10, stop_ids=(stop,)))
    assert h.core.counters["padding_rows"] == 1


def test_blocks_written_are_given_back_when_idle() -> None:
    h = Harness(small_facts(), options=EngineOptions(prefix_cache=False))
    h.run(h.submit("a", prompt=tuple(range(40))))
    assert not h.device._cells


# --- watchdog ----------------------------------------------------------------------------------------------------------------


def pass_time(h: Harness, ticks: int, tick_ns: int) -> None:
    for _ in range(ticks):
        h.tick(tick_ns)


def hung_harness() -> Harness:
    """An engine that knows what steps cost, with a launch in flight that never ends."""
    h = Harness(small_facts())
    h.run(h.submit("first", max_tokens=6))
    h.turn(h.submit("a", max_tokens=6))
    h.device._free_at = 1 << 62
    return h


def test_a_hang_is_noticed_within_a_second_of_a_measured_step() -> None:
    h = hung_harness()
    begin = h.clock.now_ns()
    with pytest.raises(DeviceFatal, match="no launch ended"):
        pass_time(h, 3000, 10_000_000)
    assert 0.9e9 < h.clock.now_ns() - begin < 1.3e9


def test_a_process_that_stood_still_gives_the_device_its_time_again() -> None:
    h = hung_harness()
    h.tick(30_000_000_000)
    for _ in range(9):
        h.tick(100_000_000)
    with pytest.raises(DeviceFatal):
        pass_time(h, 20, 100_000_000)


def test_a_launch_like_none_before_is_given_the_whole_time_out() -> None:
    h = Harness(small_facts(), options=EngineOptions(launch_timeout_s=20))
    h.turn(h.submit("a"))
    h.device._free_at = 1 << 62
    begin = h.clock.now_ns()
    with pytest.raises(DeviceFatal):
        pass_time(h, 3000, 50_000_000)
    assert h.clock.now_ns() - begin > 19e9


def test_a_cancelled_prefill_stops_at_the_next_launch() -> None:
    h = Harness(small_facts(), options=EngineOptions(prefill_chunk=4))
    h.turn(h.submit("a", prompt=tuple(range(60))))
    h.turn(Cancel(request="a"))
    before = len(h.device.launches)
    h.run()
    assert len(h.device.launches) == before
    assert before <= 2


def test_prefill_that_a_stream_waits_for_is_counted_and_other_prefill_is_not() -> None:
    h = Harness(small_facts())
    h.run(h.submit("alone", prompt=tuple(range(20)), max_tokens=4))
    assert h.core.counters["prefill_interruptions"] == 0
    h.turn(h.submit("stream", max_tokens=20))
    while not h.ids["stream"]:
        h.tick()
    h.run(h.submit("late", prompt=tuple(range(20)), max_tokens=2))
    assert h.core.counters["prefill_interruptions"] >= 1
    assert h.core.counters["prefill_interruption_ns"] > 0
    assert h.ids["stream"] == h.alone("stream")


@pytest.mark.parametrize("keep", [0, 5])
def test_a_request_that_outgrows_the_context_goes_on_and_resumes_anywhere(keep: int) -> None:
    facts = small_facts()
    h = Harness(facts)
    more = {"overflow": "shift", "keep": keep, "sampling": SamplingParams(temperature=0.9, repetition_penalty=1.2)}
    h.run(h.submit("whole", tuple(range(30)), 250, **more))
    whole = h.ids["whole"]
    assert whole == h.alone("whole")
    assert h.ends["whole"].usage is not None
    assert h.ends["whole"].usage.shifts == h.core.counters["shifts"] >= 3
    for known in range(1, 250, 7):
        h.run(h.submit(f"r{known}", tuple(range(30)), 250, output=tuple(whole[:known]), **more))
        assert h.ids[f"r{known}"] == whole


def test_guesses_stop_at_the_end_of_the_context() -> None:
    h = Harness(small_facts(), options=EngineOptions(speculation=True, adapt_guesses=False))
    h.run(h.submit("a", (1, 2) * 20, 200))  # the lookup always has something to propose
    assert h.ends["a"].reason == "length"
    assert h.ids["a"] == h.alone("a")
