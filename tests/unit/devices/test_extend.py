"""Several rows of a lane sampled in one launch: each row's answer is the one that a launch of its own would have given."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from calstack.devices.base import Completion, KVMove, KVMoveKind, LaneInput, LaneOutput, RowOutput
from calstack.errors import DeviceError
from calstack.specs import DrawKey, SamplingParams
from tests.unit.devices.conftest import GREEDY, Rig, lane

PROMPT = list(range(3, 70))
DRAFT = [11, 12, 13, 14, 15, 16, 17, 18]
SAMPLINGS = {
    "greedy": GREEDY,
    "seeded": SamplingParams(temperature=1.2, top_p=0.95),
    "penalties": SamplingParams(temperature=0.9, repetition_penalty=1.4, frequency_penalty=0.3, presence_penalty=0.2),
}


def masks(rows: int) -> np.ndarray:
    """Another set of 40 allowed ids for every row."""
    allowed = np.zeros((rows, 160), np.uint8)
    for row in range(rows):
        allowed[row, np.random.default_rng(row).permutation(160)[:40]] = 1
    return np.packbits(allowed, axis=1, bitorder="little").view(np.int32)


def extend(rig: Rig, *lanes: LaneInput) -> Completion:
    return rig.claim(rig.device.submit(rig.launch(*lanes, submodel=rig.tiny.extend)))


def sampled(sampling: SamplingParams, history: list[int], index: int, **more: Any) -> dict[str, Any]:
    """Fields of a lane that samples output `index`."""
    values: dict[str, Any] = {"sampling": sampling, "draw": DrawKey(seed=9, index=index), "prompt_history": (), "output_history": ()}
    if sampling.needs_history:
        values |= {"prompt_history": tuple(PROMPT), "output_history": tuple(history)}
    return values | more


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("masked", [False, True])
def test_every_row_gives_what_a_decode_after_the_same_ids_gives(rig, name, masked):
    sampling, words = SAMPLINGS[name], masks(8)
    rig.run(lane(0, PROMPT, emit=False))
    rig.run(lane(0, PROMPT, range(40, 76), emit=False))
    alone = []
    for step, token in enumerate(DRAFT):
        more = {"mask": words[step]} if masked else {}
        row = sampled(sampling, [5, *DRAFT[1 : step + 1]], 3 + step, top_logprobs=2, **more)
        alone.append(rig.run(lane(len(PROMPT) + step, [token], range(40, 76), **row)).lanes[0])
    more = {"mask": words} if masked else {}
    out = extend(rig, lane(len(PROMPT), DRAFT, emit_rows=8, **sampled(sampling, [5], 3, top_logprobs=2, **more))).lanes[0]
    rows: list[RowOutput | LaneOutput] = [*out.before, out]
    assert [row.token for row in rows] == [row.token for row in alone]
    assert [(row.logprob, row.top_ids, row.top_logprobs) for row in rows] == [(r.logprob, r.top_ids, r.top_logprobs) for r in alone]
    assert len({row.token for row in rows}) > 1


def test_the_cache_behind_an_extend_is_the_one_that_decodes_leave(rig):
    for blocks in (range(36), range(40, 76)):
        rig.run(lane(0, PROMPT, blocks, emit=False))
    extend(rig, lane(len(PROMPT), DRAFT, emit_rows=8))
    for step, token in enumerate(DRAFT):
        rig.run(lane(len(PROMPT) + step, [token], range(40, 76)))
    end = len(PROMPT) + len(DRAFT)
    assert rig.run(lane(end, [4])).lanes[0].token == rig.run(lane(end, [4], range(40, 76))).lanes[0].token
    one, other = rig.device.kv_move(rig.handle, [KVMove(kind=KVMoveKind.SAVE, src=block) for block in (1, 41)])
    assert one == other


def ids(out: LaneOutput) -> list[int]:
    return [*(row.token for row in out.before), out.token]


def test_lanes_of_different_lengths_share_a_launch(rig):
    for index in range(3):
        rig.run(lane(0, PROMPT, range(36 * index, 36 * (index + 1)), emit=False))
    lanes = [lane(len(PROMPT), DRAFT[: 1 + 3 * i], range(36 * i, 36 * (i + 1)), emit_rows=1 + 3 * i) for i in range(3)]
    together = extend(rig, *lanes).lanes
    apart = [extend(rig, one).lanes[0] for one in lanes]
    assert [ids(out) for out in together] == [ids(out) for out in apart]
    assert [len(out.before) for out in together] == [0, 3, 6]


def test_only_the_last_rows_are_sampled_when_fewer_are_asked_for(rig):
    rig.run(lane(0, PROMPT, emit=False))
    every = extend(rig, lane(len(PROMPT), DRAFT, emit_rows=8)).lanes[0]
    some = extend(rig, lane(len(PROMPT), DRAFT, emit_rows=3)).lanes[0]
    assert [row.token for row in some.before] == [row.token for row in every.before[-2:]]
    assert some.token == every.token


BAD: dict[str, dict[str, Any]] = {
    "no row": {"emit_rows": 0},
    "more rows than tokens": {"emit_rows": 5},
    "a late mask": {"emit_rows": 4, "late_mask": True},
    "one mask for all rows": {"emit_rows": 4, "mask": np.zeros(5, np.int32)},
    "fewer masks than rows": {"emit_rows": 4, "mask": np.zeros((3, 5), np.int32)},
}


@pytest.mark.parametrize("name", BAD)
def test_a_lane_that_breaks_a_bound_is_refused(rig, name):
    bad = dataclasses.replace(lane(0, [1, 2, 3, 4]), **BAD[name])
    with pytest.raises(DeviceError):
        rig.device.submit(rig.launch(bad, submodel=rig.tiny.extend))
    extend(rig, lane(0, [1, 2, 3, 4], emit_rows=4))
