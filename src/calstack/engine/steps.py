"""Which launch comes next: prefill and decode in turn, guesses along where they pay, as many in flight as the depth allows."""

from __future__ import annotations

from calstack.engine.costs import StepCosts
from calstack.engine.flight import Flight, Kind, LaneRef
from calstack.engine.guessing import launch_with_guesses
from calstack.engine.lanes import Lanes
from calstack.engine.options import EngineOptions
from calstack.engine.scheduler import Choice, Planner
from calstack.engine.sequence import Phase, Sequence
from calstack.runtime.facts import CalbinFacts, Extent
from calstack.runtime.plan import LaunchPlan

__all__ = ["Steps"]


class Steps:
    """Plans launches over the running requests. `flights`: those planned and not ended, by plan id."""

    def __init__(self, facts: CalbinFacts, options: EngineOptions, lanes: Lanes, costs: StepCosts) -> None:
        self.facts, self.options, self.lanes, self.costs = facts, options, lanes, costs
        self.flights: dict[int, Flight] = {}
        self._planner = Planner(facts)
        self._plans = 0
        self._last: Kind = "decode"

    def plan(self) -> tuple[LaunchPlan, ...]:
        """Launches to make now, up to the depth."""
        launches: list[LaunchPlan] = []
        while len(self.flights) < self.options.depth:
            plan = self._next()
            if plan is None:
                break
            launches.append(plan)
        return tuple(launches)

    def _next(self) -> LaunchPlan | None:
        """One launch: prefill and decode take turns when both have work."""
        first, second = (self._decode, self._prefill) if self._last == "prefill" else (self._prefill, self._decode)
        return first() or second()

    def _prefill(self) -> LaunchPlan | None:
        waiting = sorted((s for s in self.lanes.running if s.prefilling), key=lambda s: s.rank)
        if not waiting:
            return None
        wants = [Extent(s.planned, s.wanted(self.options)) for s in waiting]
        choice = self._planner.prefill(wants, self._budget())
        return self._launch("prefill", choice, waiting) if choice else None

    def _budget(self) -> int:
        """Most prompt tokens of a launch: all it can hold, or what the streams' inter-token target leaves."""
        target = self.options.itl_target_ms
        if not target or all(s.prefilling for s in self.lanes.running):
            return self.facts.max_tokens_per_launch
        return self.costs.rows_within(target * 1e6, self.options.min_chunk)

    def _decode(self) -> LaunchPlan | None:
        ready = [s for s in self.lanes.running if not s.prefilling and s.to_come > 0 and self._may_run_ahead(s)]
        granted = [s for s in sorted(ready, key=lambda s: s.rank) if s.phase is Phase.RUNNING and self.lanes.room(s)]
        granted = [s for s in granted if s.phase is Phase.RUNNING]
        if not granted:
            return None
        granted.sort(key=lambda s: (s.last_plan, s.slot))
        if self.options.speculation:
            made = launch_with_guesses(self._plans, granted, self.lanes, self._planner, self.costs, self.options)
            if made is not None:
                return self._fly(*made)
        choice = self._planner.decode([s.planned for s in granted])
        return self._launch("decode", choice, granted) if choice else None

    def _may_run_ahead(self, seq: Sequence) -> bool:
        """A sampler with history can take one unknown id from the device, not two; a mask needs the id before it, unless it comes late."""
        if seq.drafting or (seq.constraint is not None and seq.pending and not self.options.late_masks):
            return False
        if self.options.speculation and seq.pending and seq.promising:
            return False
        return len(seq.pending) < 2 or not seq.submit.sampling.needs_history

    def _launch(self, kind: Kind, choice: Choice, candidates: list[Sequence]) -> LaunchPlan:
        plan_id, lanes, refs = self._plans, [], []
        for lane, (index, count) in enumerate(choice.lanes):
            seq = candidates[index]
            lanes.append(seq.take(plan_id, lane, count))
            refs.append(LaneRef(seq, seq.epoch, count, seq.planned, lanes[-1].emit))
        known = tuple(ref.seq.shown for ref in refs)
        return self._fly(Flight(kind, choice.submodel.key, tuple(refs)), LaunchPlan(plan_id, choice.submodel.key, tuple(lanes), known))

    def _fly(self, flight: Flight, plan: LaunchPlan) -> LaunchPlan:
        self._plans += 1
        self._last = flight.kind
        self.flights[plan.id] = flight
        return plan
