"""Launches that check guesses: which to take along, and what is left of them when they end.

Guesses stand behind a request's next id in one lane of an `extend` launch, where a token is sampled after every row. Each row samples
with the draw key, penalties, history and mask that its output index has, so an id that comes true is the id that would have come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Ids
from typing import TYPE_CHECKING

from calstack.engine.costs import StepCosts, best_guesses
from calstack.engine.flight import Flight, LaneRef
from calstack.engine.options import EngineOptions
from calstack.engine.scheduler import Planner
from calstack.runtime.facts import Extent, SubmodelFacts
from calstack.runtime.plan import LaunchPlan

if TYPE_CHECKING:
    from calstack.devices.base import LaneInput
    from calstack.engine.lanes import Lanes
    from calstack.engine.sequence import Sequence

__all__ = ["launch_with_guesses", "settle"]


def launch_with_guesses(
    plan_id: int, granted: Ids[Sequence], lanes: Lanes, planner: Planner, costs: StepCosts, options: EngineOptions
) -> tuple[Flight, LaunchPlan] | None:
    """An extend launch of all requests that checks guesses of each, as many as pay.

    None where there are no guesses, where they do not pay, or where no submodel takes all the requests.
    """
    most = min(options.max_guesses, planner.most_guesses)
    found = [seq.guess(lanes.spare(seq, most)) for seq in granted]
    if not any(found):
        return None
    plain = planner.decode([seq.planned for seq in granted])
    if plain is None or len(plain.lanes) < len(granted):
        return None
    counts = [len(some) for some in found]
    if options.adapt_guesses:
        counts = best_guesses([seq.acceptance.expected for seq in granted], counts, costs, plain.submodel.key)
    while any(counts):
        submodel = planner.extend([Extent(seq.planned, 1 + count) for seq, count in zip(granted, counts, strict=True)])
        if submodel is not None:
            return _launch(plan_id, submodel, granted, [some[:count] for some, count in zip(found, counts, strict=True)])
        counts = [max(count - 1, 0) for count in counts]
    return None


def _launch(plan_id: int, submodel: SubmodelFacts, granted: Ids[Sequence], guesses: Ids[list[int]]) -> tuple[Flight, LaunchPlan]:
    """The next position of each request, and its guesses behind it."""
    lanes: list[LaneInput] = []
    refs: list[LaneRef] = []
    known: list[tuple[Ids[int], Ids[int]]] = []
    for index, (seq, some) in enumerate(zip(granted, guesses, strict=True)):
        taken, kept = seq.take_guesses(plan_id, index, some)
        lanes.append(taken)
        refs.append(LaneRef(seq, seq.epoch, 1 + len(kept), seq.planned, emit=True, guesses=kept))
        known.append(seq.shown)
    return Flight("extend", submodel.key, tuple(refs)), LaunchPlan(plan_id, submodel.key, tuple(lanes), tuple(known))


def settle(lane: LaneRef, accepted: int, counters: Counter[str]) -> None:
    """A request whose guesses were in a launch goes on from what came true."""
    drafted = len(lane.guesses)
    lane.seq.acceptance.note(drafted, accepted)
    if lane.live:
        lane.seq.settle()
    counters["spec_drafts"] += 1
    counters["spec_draft_tokens"] += drafted
    counters["spec_accepted_tokens"] += accepted
