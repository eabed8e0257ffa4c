"""What every device must do, run against the built-in ones (contract: devices/base.py)."""

from __future__ import annotations

import select
import time
from typing import Any

import numpy as np
import pytest

from calstack.devices.base import DeviceStatus, KVMove, KVMoveKind, LaneInput, LogitRows, QueueFull, TokenFrom
from calstack.errors import ArtifactError, CancelledError, DeviceError, DeviceNeedsReset, DeviceRetryable
from calstack.specs import DrawKey, LogitBias, SamplingParams
from tests.unit.devices.conftest import BLOCKS, GREEDY, Rig, lane

PROMPT = list(range(3, 103))
SEEDED = SamplingParams(temperature=1.0)


def slow_lane(rig: Rig, index: int = 0) -> LaneInput:
    rows = rig.tiny.prefill_rows
    return lane(1024, [7] * rows, range(36 * index, 36 * (index + 1)), logits=LogitRows.LAST)


def greedy(rig: Rig, prompt: list[int], count: int, chunk: int = 512, blocks: range = range(36)) -> list[int]:
    """Ids a lane samples, prompt fed in chunks."""
    done = None
    for start in range(0, len(prompt), chunk):
        done = rig.run(lane(start, prompt[start : start + chunk], blocks))
    assert done is not None
    ids = [done.lanes[0].token]
    while len(ids) < count:
        ids.append(rig.run(lane(len(prompt) + len(ids) - 1, [ids[-1]], blocks)).lanes[0].token)
    return ids


# --- asynchrony ----------------------------------------------------------------------------------------------------------


def test_submit_returns_within_a_millisecond_while_a_long_launch_runs(slow):
    first = slow.device.submit(slow.launch(slow_lane(slow)))
    times = []
    for index in (1, 2, 3):
        start = time.perf_counter()
        slow.device.submit(slow.launch(slow_lane(slow, index)))
        times.append(time.perf_counter() - start)
    assert slow.device.poll(first) is None
    done = slow.claim(first)
    assert done.infer_ns > 20e6, "the launch is too short to show anything"
    assert min(times) < 5e-3


def test_the_second_launchs_input_copy_overlaps_the_first(slow):
    first = slow.device.submit(slow.launch(slow_lane(slow)))
    second = slow.device.submit(slow.launch(slow_lane(slow, 1)))
    a, b = slow.claim(first), slow.claim(second)
    assert b.submitted_ns < a.finished_ns, "its inputs were taken while the first ran"
    assert b.started_ns >= a.finished_ns, "launches run in order"


def test_the_queue_is_bounded_and_takes_launches_again_after_a_wait(slow):
    depth = slow.device.info().queue_depth
    tickets = [slow.device.submit(slow.launch(slow_lane(slow, i % 4))) for i in range(depth)]
    with pytest.raises(QueueFull) as refused:
        slow.device.submit(slow.launch(slow_lane(slow)))
    assert isinstance(refused.value, DeviceRetryable)
    for ticket in tickets[: depth - 1]:
        assert slow.device.cancel(ticket) in (True, False)
    for ticket in tickets:
        slow.device.wait(ticket, 30)
    slow.claim(slow.device.submit(slow.launch(lane(0, [1]))))


def test_a_wait_gives_nothing_when_its_time_is_over(slow):
    ticket = slow.device.submit(slow.launch(slow_lane(slow)))
    start = time.perf_counter()
    assert slow.device.wait(ticket, 0.01) is None
    assert time.perf_counter() - start > 0.005
    slow.claim(ticket)


def test_a_queued_launch_can_be_cancelled_and_a_running_one_not(slow):
    tickets = [slow.device.submit(slow.launch(slow_lane(slow, i))) for i in range(3)]
    slow.claim(tickets[0])
    time.sleep(0.02)  # the device goes on to the second by itself
    assert not slow.device.cancel(tickets[1])
    assert slow.device.cancel(tickets[2])
    dropped = slow.device.wait(tickets[2], 0)
    assert dropped is not None
    assert isinstance(dropped.error, CancelledError)
    slow.claim(tickets[1])


def test_a_completion_is_given_once(rig):
    ticket = rig.device.submit(rig.launch(lane(0, [1])))
    rig.claim(ticket)
    with pytest.raises(DeviceError, match="not known or was claimed"):
        rig.device.wait(ticket, 0)
    with pytest.raises(DeviceError, match="not known"):
        rig.device.wait(10**6, 0)


def test_the_event_descriptor_is_readable_while_a_completion_waits(slow):
    fd = slow.device.event_fd()
    ready = lambda timeout: bool(select.select([fd], [], [], timeout)[0])  # noqa: E731
    assert not ready(0)
    ticket = slow.device.submit(slow.launch(slow_lane(slow)))
    assert not ready(0)
    assert ready(30)
    assert slow.device.poll(ticket) is not None
    assert not ready(0)


def test_status_says_busy_while_a_launch_runs(slow):
    assert slow.device.status() is DeviceStatus.READY
    ticket = slow.device.submit(slow.launch(slow_lane(slow)))
    assert slow.device.status() is DeviceStatus.BUSY
    slow.claim(ticket)
    assert slow.device.status() is DeviceStatus.READY


def test_reset_ends_what_is_queued_and_the_device_runs_on(slow):
    tickets = [slow.device.submit(slow.launch(slow_lane(slow, i))) for i in range(3)]
    slow.device.reset()
    errors = [slow.device.wait(t, 30).error for t in tickets]
    assert isinstance(errors[-1], DeviceNeedsReset)
    assert slow.device.memory()[0].kv_bytes == 0
    slow.claim(slow.device.submit(slow.launch(lane(0, [1]))))


def test_close_is_idempotent_and_everything_after_it_is_refused(rig):
    rig.device.submit(rig.launch(lane(0, PROMPT)))
    rig.device.close()
    rig.device.close()
    assert rig.device.status() is DeviceStatus.CLOSED
    with pytest.raises(DeviceError, match="closed"):
        rig.device.submit(rig.launch(lane(0, [1])))


# --- what a lane's ids depend on -----------------------------------------------------------------------------------------


def test_ids_are_the_same_whatever_the_chunks(rig):
    want = greedy(rig, PROMPT, 6)
    assert len(set(want)) > 1
    assert greedy(rig, PROMPT, 6, chunk=16) == want
    assert greedy(rig, PROMPT, 6, chunk=33, blocks=range(40, 76)) == want


def test_ids_are_the_same_among_other_lanes(rig):
    want = greedy(rig, PROMPT, 3)
    other = lane(0, PROMPT[50:90], range(36, 72))
    empty = LaneInput(past_len=0, cur_len=0, blocks=(), tokens=())
    first = rig.run(other, empty, lane(0, PROMPT, range(72, 108))).lanes
    assert first[1].token == -1
    assert first[2].token == want[0]
    second = rig.run(lane(100, [want[0]], range(72, 108)), lane(40, [5], range(36, 72))).lanes
    assert second[0].token == want[1]


def test_a_token_of_an_earlier_launch_stays_on_the_device(rig):
    want = greedy(rig, PROMPT, 3)
    a = rig.device.submit(rig.launch(lane(0, [9]), lane(0, PROMPT, range(36, 72))))
    b = rig.device.submit(rig.launch(lane(100, TokenFrom(a, 1), range(36, 72))))
    c = rig.device.submit(rig.launch(lane(101, TokenFrom(b, 0), range(36, 72))))
    assert [rig.claim(a).lanes[1].token, rig.claim(b).lanes[0].token, rig.claim(c).lanes[0].token] == want


def test_a_token_from_a_cancelled_launch_ends_the_launch_that_needs_it(slow):
    first = slow.device.submit(slow.launch(slow_lane(slow)))
    second = slow.device.submit(slow.launch(slow_lane(slow, 1)))
    third = slow.device.submit(slow.launch(lane(1536, TokenFrom(second, 0), range(36, 72))))
    assert slow.device.cancel(second)
    slow.claim(first)
    done = slow.device.wait(third, 30)
    assert done is not None
    assert isinstance(done.error, DeviceRetryable)


def test_the_device_appends_its_own_token_to_the_history(rig):
    params = SamplingParams(temperature=0.0, repetition_penalty=1.5, frequency_penalty=0.5)
    more: dict[str, Any] = {"sampling": params, "prompt_history": PROMPT}
    a = rig.run(lane(0, PROMPT, **more)).lanes[0].token
    host = rig.run(lane(100, [a], output_history=[a], **more)).lanes[0].token
    first = rig.device.submit(rig.launch(lane(0, PROMPT, **more)))
    device = rig.device.submit(rig.launch(lane(100, TokenFrom(first, 0), output_history=[], **more)))
    rig.claim(first)
    assert rig.claim(device).lanes[0].token == host


def test_the_draw_key_alone_decides_a_random_draw(rig):
    def draw(seed: int, index: int) -> int:
        token: int = rig.run(lane(0, PROMPT, sampling=SEEDED, draw=DrawKey(seed=seed, index=index))).lanes[0].token
        return token

    assert draw(1, 0) == draw(1, 0)
    assert len({draw(seed, index) for seed in range(4) for index in range(4)}) > 4


def test_a_mask_leaves_only_its_ids(rig):
    mask = np.zeros(-(-rig.tiny.vocab // 32), np.int32)
    mask[2] = 1 << 5
    assert rig.run(lane(0, PROMPT, mask=mask)).lanes[0].token == 69


def test_a_mask_without_ids_fails_its_lane_alone(rig):
    mask = np.zeros(-(-rig.tiny.vocab // 32), np.int32)
    lanes = rig.run(lane(0, PROMPT, mask=mask), lane(0, PROMPT, range(36, 72))).lanes
    assert lanes[0].token == -2
    assert lanes[1].token == greedy(rig, PROMPT, 1)[0]


def test_logits_come_only_for_the_rows_asked_for(rig):
    vocab = rig.tiny.vocab
    none = rig.run(lane(0, PROMPT))
    assert none.lanes[0].logits is None
    assert none.d2h_bytes < 64, "no buffer of vocabulary size may cross"
    last = rig.run(lane(0, PROMPT, logits=LogitRows.LAST))
    every = rig.run(lane(0, PROMPT, logits=LogitRows.ALL, emit=False, sampling=None))
    assert last.lanes[0].logits.shape == (1, vocab)
    assert every.lanes[0].logits.shape == (len(PROMPT), vocab)
    assert every.lanes[0].token == -1
    assert np.array_equal(every.lanes[0].logits[-1], last.lanes[0].logits[0])
    assert int(np.argmax(last.lanes[0].logits[0])) == last.lanes[0].token
    assert every.d2h_bytes >= len(PROMPT) * vocab * 4


def test_log_probabilities_come_when_asked_for(rig):
    out = rig.run(lane(0, PROMPT, top_logprobs=3)).lanes[0]
    assert len(out.top_ids) == len(out.top_logprobs) == 3
    assert out.top_ids[0] == out.token
    assert out.logprob == out.top_logprobs[0] <= 0
    assert np.isnan(rig.run(lane(0, PROMPT)).lanes[0].logprob)


def test_a_profile_adds_up_to_the_launch(rig):
    done = rig.claim(rig.device.submit(rig.launch(lane(0, PROMPT * 5), profile=True)))
    assert abs(sum(c.ns for c in done.calls) - done.infer_ns) <= 0.02 * done.infer_ns
    assert all(c.ns >= 0 and c.bytes >= 0 and c.ops >= 0 for c in done.calls)


def test_times_of_a_launch_follow_each_other(rig):
    done = rig.run(lane(0, PROMPT))
    assert done.submitted_ns <= done.started_ns <= done.finished_ns
    assert done.infer_ns <= done.finished_ns - done.started_ns
    assert done.h2d_bytes >= 4 * len(PROMPT)


# --- KV blocks -----------------------------------------------------------------------------------------------------------


def test_blocks_copied_saved_and_restored_carry_their_positions(rig):
    want = greedy(rig, PROMPT, 2)
    rig.run(lane(0, PROMPT))
    moves = [KVMove(KVMoveKind.COPY, src=0, dst=100), KVMove(KVMoveKind.SAVE, src=1)]
    saved = rig.device.kv_move(rig.handle, moves)
    assert len(saved) == 1
    rig.device.kv_move(rig.handle, [KVMove(KVMoveKind.CLEAR, dst=0), KVMove(KVMoveKind.CLEAR, dst=1)])
    rig.device.kv_move(rig.handle, [KVMove(KVMoveKind.RESTORE, dst=101, data=saved[0])])
    assert rig.run(lane(100, [want[0]], [100, 101])).lanes[0].token == want[1]


def test_clearing_a_block_gives_its_memory_back(rig):
    rig.run(lane(0, PROMPT))
    used = rig.device.memory()[0].kv_bytes
    assert used > 0
    rig.device.kv_move(rig.handle, [KVMove(KVMoveKind.CLEAR, dst=b) for b in (0, 1)])
    assert rig.device.memory()[0].kv_bytes == 0


@pytest.mark.parametrize(
    "move", [KVMove(KVMoveKind.COPY, src=0, dst=BLOCKS), KVMove(KVMoveKind.SAVE, src=-1), KVMove(KVMoveKind.CLEAR, dst=-1)]
)
def test_a_move_of_a_block_that_does_not_exist_is_refused(rig, move):
    with pytest.raises(DeviceError, match="block"):
        rig.device.kv_move(rig.handle, [move])


def test_a_restore_of_another_size_is_refused(rig):
    with pytest.raises(DeviceError, match="bytes"):
        rig.device.kv_move(rig.handle, [KVMove(KVMoveKind.RESTORE, dst=0, data=b"123")])


# --- bounds --------------------------------------------------------------------------------------------------------------

BAD_LANES: dict[str, dict[str, Any]] = {
    "negative past": {"past_len": -1},
    "cur beyond q_len": {"cur_len": 513, "tokens": [1] * 513},
    "beyond the context": {"past_len": 2301},
    "too few blocks": {"blocks": [0]},
    "unknown block": {"blocks": [0, BLOCKS]},
    "negative block": {"blocks": [-1, 1]},
    "fewer tokens than cur_len": {"tokens": [1]},
    "token outside the vocabulary": {"tokens": [1, 2, 3, 160]},
    "negative token": {"tokens": [1, 2, -3, 4]},
    "emit without sampling": {"emit": True},
    "temperature without a draw": {"emit": True, "sampling": SEEDED},
    "mask of another size": {"emit": True, "sampling": GREEDY, "mask": np.zeros(3, np.int32)},
    "mask of another type": {"emit": True, "sampling": GREEDY, "mask": np.zeros(5, np.float64)},
    "too many log-probabilities": {"emit": True, "sampling": GREEDY, "top_logprobs": 65},
    "an adapter": {"adapter": 1},
    "more sampled rows than one of a prefill": {"emit": True, "sampling": GREEDY, "emit_rows": 2},
    "history outside the vocabulary": {
        "emit": True,
        "sampling": SamplingParams(temperature=0.0, presence_penalty=1.0),
        "output_history": [160],
    },
    "bias outside the vocabulary": {
        "emit": True,
        "sampling": SamplingParams(temperature=0.0, logit_bias=(LogitBias(token=160, bias=1.0),)),
    },
    "token of an unknown launch": {"cur_len": 1, "tokens": TokenFrom(10**9, 0)},
    "token of no launch": {"cur_len": 1, "tokens": TokenFrom(-5, 0)},
    "many rows from one token": {"cur_len": 2, "tokens": TokenFrom(1, 0)},
}


@pytest.mark.parametrize("name", BAD_LANES)
def test_a_launch_that_breaks_a_bound_is_refused_and_nothing_is_queued(rig, name):
    values: dict[str, Any] = {"past_len": 62, "cur_len": 4, "blocks": [0, 1], "tokens": [1, 2, 3, 4]} | BAD_LANES[name]
    if values["past_len"] > 1000:
        values["blocks"] = range(40)
    with pytest.raises(DeviceError):
        rig.device.submit(rig.launch(LaneInput(**values), submodel=rig.tiny.prefill))
    assert rig.device.status() is DeviceStatus.READY
    rig.run(lane(0, PROMPT))


def test_a_lane_cannot_take_the_token_of_a_lane_that_does_not_emit(rig):
    ticket = rig.device.submit(rig.launch(lane(0, [1], emit=False, sampling=None)))
    rig.claim(ticket)
    with pytest.raises(DeviceError):
        rig.device.submit(rig.launch(lane(1, TokenFrom(ticket, 0))))


def test_launches_of_unknown_shape_are_refused(rig):
    with pytest.raises(DeviceError, match="no submodel"):
        rig.device.submit(rig.launch(lane(0, [1]), submodel="decode.b99"))
    with pytest.raises(DeviceError, match="lanes"):
        rig.device.submit(rig.launch(*(lane(0, [1], [i]) for i in range(5))))
    with pytest.raises(DeviceError, match="rows"):
        rig.device.submit(rig.launch(*(lane(0, [1] * 200, range(4 * i, 4 * i + 4)) for i in range(3))))
    with pytest.raises(DeviceError, match="rows"):
        rig.device.submit(rig.launch(lane(0, [], [])))


def test_strict_refuses_two_lanes_that_write_one_block(rig):
    with pytest.raises(DeviceError, match="written by lane 0"):
        rig.device.submit(rig.launch(lane(0, [1], [5]), lane(0, [2], [5])))


# --- calbins and buffers -------------------------------------------------------------------------------------------------


def test_unload_gives_all_memory_back(rig):
    before = rig.device.memory()[0]
    assert before.parameter_bytes > 0
    second = rig.device.load(rig.path, kv_blocks=8)
    assert rig.device.memory()[0].parameter_bytes == 2 * before.parameter_bytes
    rig.device.unload(second)
    assert rig.device.memory()[0].parameter_bytes == before.parameter_bytes
    rig.run(lane(0, PROMPT))
    rig.device.unload(rig.handle)
    after = rig.device.memory()[0]
    assert (after.used_bytes, after.kv_bytes, after.parameter_bytes) == (0, 0, 0)
    with pytest.raises(DeviceError, match="not loaded"):
        rig.run(lane(0, [1]))


def test_two_calbins_answer_side_by_side(rig):
    want = greedy(rig, PROMPT, 4)
    other = Rig(rig.device, rig.device.load(rig.path, kv_blocks=40), rig.tiny, rig.path)
    assert greedy(other, PROMPT, 4) == want
    assert greedy(rig, PROMPT, 4, blocks=range(60, 96)) == want


def test_unload_is_refused_while_a_launch_is_in_flight(slow):
    ticket = slow.device.submit(slow.launch(slow_lane(slow)))
    with pytest.raises(DeviceError, match="in flight"):
        slow.device.unload(slow.handle)
    slow.claim(ticket)
    slow.device.unload(slow.handle)


def test_load_refuses_what_is_no_calbin(rig, tmp_path):
    with pytest.raises(ArtifactError):
        rig.device.load(tmp_path, kv_blocks=8)


@pytest.mark.parametrize("blocks", [0, -1])
def test_load_refuses_a_kv_size_that_makes_no_sense(rig, blocks):
    with pytest.raises(DeviceError, match="KV blocks"):
        rig.device.load(rig.path, kv_blocks=blocks)


def test_buffers_hold_what_was_written_and_are_counted(rig):
    buffer = rig.device.alloc(1000)
    assert rig.device.memory()[0].buffer_bytes == 1000
    ticket = rig.device.write(buffer, b"abc", 997)
    assert rig.claim(ticket).h2d_bytes == 3
    assert rig.device.read(buffer, 4, 996) == b"\0abc"
    for call in (lambda: rig.device.write(buffer, b"abcd", 997), lambda: rig.device.read(buffer, 5, 996), lambda: rig.device.free(99)):
        with pytest.raises(DeviceError):
            call()
    rig.device.free(buffer)
    assert rig.device.memory()[0].buffer_bytes == 0


def test_moves_wait_for_the_launches_before_them_and_submit_waits_for_neither(slow):
    """Block 100 takes block 0's content between two launches; block 1 is cleared only after the launch that reads it."""
    want = greedy(slow, PROMPT, 2)
    slow.run(lane(0, PROMPT))
    ticket = slow.device.submit(slow.launch(slow_lane(slow, 1)))
    read = slow.device.submit(slow.launch(lane(100, [want[0]], [0, 1])))
    slow.device.kv_move(slow.handle, [KVMove(KVMoveKind.COPY, src=1, dst=101), KVMove(KVMoveKind.CLEAR, dst=1)])
    again = slow.device.submit(slow.launch(lane(100, [want[0]], [0, 101])))
    if slow.device.info().name != "null":  # its time does not pass by itself
        assert slow.device.poll(read) is None, "neither call waited for the launches before it"
    slow.claim(ticket)
    assert slow.claim(read).lanes[0].token == want[1]
    assert slow.claim(again).lanes[0].token == want[1]


# --- late masks -----------------------------------------------------------------------------------------------------------


def _only(tiny, token: int):
    mask = np.zeros(-(-tiny.vocab // 32), np.int32)
    mask[token // 32] = np.int32(1) << (token % 32)
    return mask


def _late(rig: Rig, *lanes: LaneInput) -> int:
    if not rig.device.info().late_inputs:
        with pytest.raises(DeviceError):
            rig.device.submit(rig.launch(*lanes))
        pytest.skip("the device takes no late inputs, and says so")
    return rig.device.submit(rig.launch(*lanes))


def test_a_late_mask_acts_as_one_that_came_with_the_launch(rig):
    ticket = _late(rig, lane(0, PROMPT, late_mask=True), lane(0, PROMPT, range(36, 72)))
    assert rig.device.wait(ticket, 0.05) is None, "the launch waits for its mask"
    rig.device.give_mask(ticket, 0, _only(rig.tiny, 23))
    done = rig.claim(ticket)
    free = rig.run(lane(0, PROMPT)).lanes[0].token
    assert [out.token for out in done.lanes] == [23, free]
    assert done.infer_ns < 50e6, "waiting for a mask is not the device's time"


def test_a_late_mask_may_come_before_its_launch_runs_and_again_after_its_end(rig):
    first = rig.device.submit(rig.launch(lane(0, PROMPT)))
    ticket = _late(rig, lane(len(PROMPT), TokenFrom(first, 0), late_mask=True))
    rig.device.give_mask(ticket, 0, _only(rig.tiny, 31))
    rig.claim(first)
    assert rig.claim(ticket).lanes[0].token == 31
    rig.device.give_mask(ticket, 0, _only(rig.tiny, 32))


def test_no_mask_at_last_means_that_every_id_is_allowed(rig):
    ticket = _late(rig, lane(0, PROMPT, late_mask=True))
    rig.device.give_mask(ticket, 0, None)
    assert rig.claim(ticket).lanes[0].token == rig.run(lane(0, PROMPT)).lanes[0].token


def test_a_reset_ends_a_launch_that_waits_for_a_mask(rig):
    ticket = _late(rig, lane(0, PROMPT, late_mask=True))
    assert rig.device.wait(ticket, 0.02) is None
    rig.device.reset()
    with pytest.raises(DeviceNeedsReset):
        rig.claim(ticket)
    assert rig.run(lane(0, PROMPT)).lanes[0].token >= 0


def test_a_launch_whose_mask_never_comes_is_retryable(rig):
    ticket = _late(rig, lane(0, PROMPT, late_mask=True))
    with pytest.raises(DeviceRetryable):
        rig.claim(ticket)


def test_a_late_mask_of_the_wrong_size_is_refused(rig):
    ticket = _late(rig, lane(0, PROMPT, late_mask=True))
    with pytest.raises(DeviceError):
        rig.device.give_mask(ticket, 0, np.zeros(1, np.int32))
    rig.device.give_mask(ticket, 0, None)
    rig.claim(ticket)
