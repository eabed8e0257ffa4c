"""Launches that check guesses: which to take along, their lanes, and what is left of them when they end.

A guess is a lane of its own in a decode launch, over the request's own blocks, one position further than the lane before it. Every lane
samples with the keys, penalties and history that its output index has, so an id that comes true is the id that would have come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Ids
from typing import TYPE_CHECKING

from calstack.engine.costs import StepCosts, best_guesses
from calstack.engine.flight import Flight, LaneRef
from calstack.engine.scheduler import Planner
from calstack.runtime.plan import LaunchPlan

if TYPE_CHECKING:
    from calstack.devices.base import LaneInput
    from calstack.engine.lanes import Lanes
    from calstack.engine.sequence import Sequence

__all__ = ["launch_with_guesses", "settle"]


def launch_with_guesses(
    plan_id: int, granted: Ids[Sequence], lanes: Lanes, planner: Planner, costs: StepCosts, most: int
) -> tuple[Flight, LaunchPlan] | None:
    """A decode launch of all requests in which lanes that would stay empty check at most `most` guesses of each, as many as pay.

    None where there are no guesses, or where they do not pay.
    """
    guesses = _guesses(granted, lanes, planner, costs, most)
    pasts = [seq.planned + step for seq, found in zip(granted, guesses, strict=True) for step in range(1 + len(found))]
    choice = planner.decode(pasts) if any(guesses) else None
    if choice is None or len(choice.lanes) < len(pasts):
        return None
    return _launch(plan_id, choice.submodel.key, granted, guesses)


def _guesses(granted: Ids[Sequence], lanes: Lanes, planner: Planner, costs: StepCosts, most: int) -> list[list[int]]:
    room = planner.most_lanes - len(granted)
    found = [seq.guess(lanes.spare(seq, min(most, room))) if room > 0 else [] for seq in granted]
    if not any(found):
        return found
    shares = [seq.acceptance.expected for seq in granted]
    counts = best_guesses(shares, [len(some) for some in found], planner.buckets, costs)
    return [some[:count] for some, count in zip(found, counts, strict=True)]


def _launch(plan_id: int, submodel: str, granted: Ids[Sequence], guesses: Ids[list[int]]) -> tuple[Flight, LaunchPlan]:
    """The next position of each request, and its guesses behind it."""
    lanes: list[LaneInput] = []
    refs: list[LaneRef] = []
    known: list[tuple[Ids[int], Ids[int]]] = []
    for seq, found in zip(granted, guesses, strict=True):
        if not found:
            lanes.append(seq.take(plan_id, len(lanes), 1))
            refs.append(LaneRef(seq, seq.epoch, 1, seq.planned, emit=True))
            known.append((seq.submit.prompt, seq.output))
            continue
        start = seq.planned
        lanes += seq.take_guesses(plan_id, len(lanes), found)
        for step in range(1 + len(found)):
            refs.append(LaneRef(seq, seq.epoch, 1, start + step + 1, emit=True, guess=found[step - 1] if step else -1))
            known.append((seq.submit.prompt, [*seq.output, *found[:step]]))
    return Flight("decode", submodel, tuple(refs)), LaunchPlan(plan_id, submodel, tuple(lanes), tuple(known))


def settle(flight: Flight, counters: Counter[str]) -> None:
    """Requests whose guesses were in the launch go on from what came true."""
    for seq, drafted in Counter(lane.seq for lane in flight.lanes if lane.guess >= 0 and lane.live).items():
        accepted = sum(lane.seq is seq and lane.guess >= 0 and lane.end < seq.length for lane in flight.lanes)
        seq.acceptance.note(drafted, accepted)
        seq.settle()
        counters["spec_drafts"] += 1
        counters["spec_draft_tokens"] += drafted
        counters["spec_accepted_tokens"] += accepted
