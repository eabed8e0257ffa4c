"""The engine core: one synchronous state machine, `step(now, events) → launches, outputs`.

It knows no thread, socket or wall clock. Launches run on the device in the order they are planned, so a lane may take its input
token from a launch that has not ended, and blocks may change hands while a launch that writes to them is still in flight.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import Counter
from collections.abc import Iterable
from typing import Literal

from calstack.devices.base import Completion, LaneOutput
from calstack.engine.admission import Queue, check_submit, output_limit
from calstack.engine.costs import StepCosts, Work, wait_estimate_s
from calstack.engine.kv import BlockPool
from calstack.engine.options import EngineOptions
from calstack.engine.result import Outbox, StepResult, error_value
from calstack.engine.scheduler import Choice, Planner
from calstack.engine.sequence import Phase, Sequence
from calstack.errors import CalstackError, DeadlineError, DeviceError, OverloadedError, UnavailableError
from calstack.runtime.facts import CalbinFacts, Extent
from calstack.runtime.plan import DeviceWasReset, LaunchDone, LaunchPlan, RuntimeEvent
from calstack.wire import Cancel, Drain, Finish, LaunchTimes, Submit, TokenLogprob

__all__ = ["Core", "CoreEvent"]

CoreEvent = Submit | Cancel | Drain | RuntimeEvent
Kind = Literal["prefill", "decode"]


@dataclasses.dataclass(frozen=True, slots=True)
class _LaneRef:
    """A lane of a launch in flight; stale once the request's epoch has moved on."""

    seq: Sequence
    epoch: int
    count: int
    end: int  # KV positions of the request after the launch
    emit: bool

    @property
    def live(self) -> bool:
        return self.seq.epoch == self.epoch and self.seq.phase is Phase.RUNNING


@dataclasses.dataclass(frozen=True, slots=True)
class _Flight:
    kind: Kind
    submodel: str
    lanes: tuple[_LaneRef, ...]


class Core:
    """Continuous batching over one calbin. All time comes in as `now_ns`."""

    def __init__(self, facts: CalbinFacts, *, kv_blocks: int, options: EngineOptions | None = None) -> None:
        self.facts, self.options = facts, options or EngineOptions()
        self.context = min(facts.context, kv_blocks * facts.block_positions)
        self.max_lanes = min(self.options.max_lanes or facts.max_lanes, facts.max_lanes)
        cache = self.options.prefix_cache_bytes // max(facts.bytes_per_block, 1) if self.options.prefix_cache else 0
        self.pool = BlockPool(kv_blocks, facts.block_positions, cache_limit=cache)
        self.costs = StepCosts()
        self.counters: Counter[str] = Counter()
        self.queue = Queue()
        self.draining = False
        self._planner = Planner(facts)
        self._live: dict[str, Sequence] = {}
        self._slots: list[Sequence | None] = [None] * self.max_lanes
        self._flights: dict[int, _Flight] = {}
        self._deadlines: list[tuple[int, int, str]] = []
        self._out = Outbox()
        self._ended: list[tuple[Completion, LaunchTimes]] = []
        self._orders = self._plans = 0
        self._last: Kind = "decode"
        self._blocked_ns: int | None = None  # since when the head of the queue waits for blocks
        self._work_ns = self._device_ns = 0  # work exists since; the last launch ended at

    # --- the one entry ---------------------------------------------------------------------------------------------------------

    def step(self, now_ns: int, events: Iterable[CoreEvent] = ()) -> StepResult:
        """Take events, end what is due, plan launches up to the depth."""
        for event in events:
            self._take(event, now_ns)
        self._expire(now_ns)
        self._admit(now_ns)
        launches = self._plan_all(now_ns)
        freed: list[int] = []
        if self.idle:
            self.counters["leaks"] += self.pool.leaks() + sum(slot is not None for slot in self._slots)
            freed = self.pool.uncommitted()
        ended, self._ended = tuple(self._ended), []
        return StepResult(launches, self._out.take(), ended, tuple(freed), self._wake(), bool(self._live))

    @property
    def idle(self) -> bool:
        """True when no request is known and no launch is in flight."""
        return not self._live and not self._flights

    @property
    def running(self) -> list[Sequence]:
        """Requests that hold a lane."""
        return [seq for seq in self._slots if seq is not None]

    @property
    def in_flight(self) -> int:
        """Launches planned and not ended."""
        return len(self._flights)

    def kv_wait_ns(self, now_ns: int) -> int:
        """How long the head of the queue has been waiting for blocks."""
        return now_ns - self._blocked_ns if self._blocked_ns is not None else 0

    # --- events ----------------------------------------------------------------------------------------------------------------

    def _take(self, event: CoreEvent, now_ns: int) -> None:
        match event:
            case Submit():
                self._submit(event, now_ns)
            case Cancel():
                seq = self._live.get(event.request)
                if seq is not None:
                    self._end(seq, "cancelled", now_ns)
            case LaunchDone():
                self._done(event, now_ns)
            case DeviceWasReset():
                self._reset(event.cause, now_ns)
            case Drain():
                self.draining = True

    def _submit(self, submit: Submit, now_ns: int) -> None:
        if submit.request in self._live:
            self.counters["duplicates"] += 1
            return  # the running one keeps the name; a second end for it would break the stream
        try:
            self._check(submit)
        except CalstackError as error:
            self.counters["refused"] += 1
            self._out.finish(submit.request, Finish(reason="error", error=error_value(error)))
            return
        if not self._live:
            self._work_ns = now_ns
        stops = frozenset(submit.stop_ids) | (frozenset() if submit.ignore_eos else frozenset(self.facts.eos_ids))
        self._orders += 1
        seq = Sequence(submit, order=self._orders, now_ns=now_ns, limit=output_limit(submit, self.context), stops=stops)
        self._live[submit.request] = seq
        self.counters["accepted"] += 1
        self.queue.push(seq)
        if len(seq.output) >= seq.limit:
            self._end(seq, "length", now_ns)
            return
        if seq.deadline_ns:
            heapq.heappush(self._deadlines, (seq.deadline_ns, seq.order, seq.request))
        self._admit(now_ns)

    def _check(self, submit: Submit) -> None:
        check_submit(submit, self.facts, context=self.context, options=self.options)
        if self.draining:
            raise UnavailableError("the engine is draining")
        if submit.output:
            return  # resumed: it was accepted before
        full = len(self.queue) >= self.options.max_queued_requests
        if full or (self.queue.tokens + len(submit.prompt) > self.options.max_queued_tokens and len(self.queue) > 0):
            raise OverloadedError("the queue is full", retry_after=max(self.retry_after_s(), 1.0))

    def retry_after_s(self) -> float:
        """Estimated seconds until a request at the tail of the queue would start."""
        return wait_estimate_s(self.costs, self.max_lanes, map(self._work, self.running), [self._work(s) for s in self.queue])

    def _work(self, seq: Sequence) -> Work:
        rows = (seq.target - seq.planned) if seq.phase is Phase.RUNNING else seq.length
        return rows, int((seq.limit - len(seq.output)) * self.costs.output_share)

    def _reset(self, cause: DeviceError, now_ns: int) -> None:
        """KV is gone and so are the launches in flight: every running request starts over from its known ids."""
        self.counters["resets"] += 1
        self._flights.clear()
        for seq in sorted(self.running, key=lambda s: s.rank):
            seq.restarts += 1
            if seq.restarts > self.options.max_restarts:
                self._end(seq, "error", now_ns, error=UnavailableError(f"the device failed again and again: {cause.what}"))
            else:
                self._vacate(seq, Phase.WAITING)
                self.queue.push(seq)
        self.pool.forget()

    # --- ends ------------------------------------------------------------------------------------------------------------------

    def _done(self, done: LaunchDone, now_ns: int) -> None:
        flight = self._flights.pop(done.id, None)
        if flight is None:
            return
        if done.completion is None:
            error = done.error or DeviceError("the launch failed", where=flight.submodel)
            self.counters["failed_launches"] += 1
            for lane in flight.lanes:
                if lane.live:
                    self._end(lane.seq, "error", now_ns, error=error)
            return
        useful = sum(lane.count for lane in flight.lanes if lane.live)
        for lane, output in zip(flight.lanes, done.completion.lanes, strict=True):
            if lane.live:
                self._lane_done(lane, output, now_ns)
        self._account(flight, done.completion, useful)

    def _lane_done(self, lane: _LaneRef, output: LaneOutput, now_ns: int) -> None:
        seq = lane.seq
        seq.done = lane.end
        self._publish(seq)
        if not lane.emit:
            return
        seq.pending.popleft()
        seq.first_token_ns = seq.first_token_ns or now_ns
        if output.token in seq.stops:
            self._end(seq, "stop", now_ns, stop_id=output.token)
            return
        seq.output.append(output.token)
        self.counters["tokens"] += 1
        logprob = None
        if seq.submit.top_logprobs >= 0:
            logprob = TokenLogprob(logprob=output.logprob, top_ids=output.top_ids, top_logprobs=output.top_logprobs)
        self._out.token(seq.request, output.token, logprob)
        if len(seq.output) >= seq.limit:
            self._end(seq, "length", now_ns)

    def _publish(self, seq: Sequence) -> None:
        """Name blocks that are full of computed, known ids."""
        size = self.pool.positions
        while self.pool.cache_limit and seq.submit.cache_prompt and (seq.hashed + 1) * size <= seq.done:
            start = seq.hashed * size
            seq.key = self.pool.publish(seq.key, seq.ids(start, start + size), seq.blocks[seq.hashed])
            seq.hashed += 1

    def _account(self, flight: _Flight, c: Completion, useful: int) -> None:
        rows = sum(lane.count for lane in flight.lanes)
        busy = c.h2d_ns + c.infer_ns + c.d2h_ns
        begin = c.finished_ns - busy
        framework = max(0, begin - max(self._device_ns, self._work_ns))
        self._device_ns = c.finished_ns
        self.counters[f"{flight.kind}_rows"] += rows
        self.counters["padding_rows"] += rows - useful
        if flight.kind == "prefill":
            self.costs.prefill(rows, busy)
        else:
            self.costs.decode(flight.submodel, busy)
        self._ended.append((c, _times(flight, rows, useful, c, framework)))

    def _end(
        self,
        seq: Sequence,
        reason: Literal["stop", "length", "cancelled", "error"],
        now_ns: int,
        *,
        stop_id: int = -1,
        error: CalstackError | None = None,
    ) -> None:
        """The one end of a request: everything it holds goes back."""
        if seq.phase is Phase.WAITING:
            self.queue.remove(seq)
        usage = seq.usage(now_ns, extra=1 if reason == "stop" else 0)
        self._vacate(seq, Phase.ENDED)
        del self._live[seq.request]
        if reason in ("stop", "length"):
            self.costs.ended(len(seq.output), seq.limit)
        self.counters[f"ended_{reason}"] += 1
        value = error_value(error) if error else None
        self._out.finish(seq.request, Finish(reason=reason, stop_id=stop_id, error=value, usage=usage))

    def _vacate(self, seq: Sequence, phase: Phase) -> None:
        if seq.slot >= 0:
            self._slots[seq.slot] = None
        self.pool.release(seq.stop(phase))

    def _expire(self, now_ns: int) -> None:
        """End requests whose deadline has passed, and a head of the queue that has waited too long for blocks."""
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            _, order, request = heapq.heappop(self._deadlines)
            seq = self._live.get(request)
            if seq is not None and seq.order == order:
                self._end(seq, "error", now_ns, error=DeadlineError("the deadline passed"))
        limit = self.options.kv_wait_timeout_s
        head = self.queue.head
        if limit and head is not None and self.kv_wait_ns(now_ns) > limit * 1e9:
            self._blocked_ns = None
            error = OverloadedError(f"no KV blocks within {limit:.0f} s", retry_after=max(self.retry_after_s(), 1.0))
            self._end(head, "error", now_ns, error=error)

    def _wake(self) -> int | None:
        times = [self._deadlines[0][0]] if self._deadlines else []
        if self._blocked_ns is not None and self.options.kv_wait_timeout_s:
            times.append(self._blocked_ns + int(self.options.kv_wait_timeout_s * 1e9) + 1)
        return min(times, default=None)

    # --- lanes and blocks ------------------------------------------------------------------------------------------------------

    def _admit(self, now_ns: int) -> None:
        """Give lanes and blocks to the queue's head while it can have them; nobody overtakes it."""
        while (head := self.queue.head) is not None and None in self._slots and self._may_join(head):
            if not self._start(head, now_ns):
                self._blocked_ns = now_ns if self._blocked_ns is None else self._blocked_ns
                return
            self._blocked_ns = None
        if self.queue.head is None:
            self._blocked_ns = None

    def _may_join(self, head: Sequence) -> bool:
        running = self.running
        return not running or not (head.submit.alone or any(seq.submit.alone for seq in running))

    def _start(self, seq: Sequence, now_ns: int) -> bool:
        shared, key = self._match(seq)
        more = self.pool.take(self.facts.blocks_for(seq.length + 1) - len(shared))
        if more is None:
            self.pool.release(shared)
            return False
        self.queue.remove(seq)
        cached = len(shared) * self.pool.positions
        slot = self._slots.index(None)
        self._slots[slot] = seq
        seq.start(slot, [*shared, *more], len(shared), key, cached, now_ns)
        self.counters["cached_tokens"] += cached
        return True

    def _match(self, seq: Sequence) -> tuple[list[int], bytes]:
        if not seq.submit.cache_prompt or not self.pool.cache_limit:
            return [], seq.key
        limit = (seq.length - 1) // self.pool.positions  # the last id must be computed: it gives the next token
        return self.pool.match(seq.key, seq.ids(0, seq.length), limit)

    def _room(self, seq: Sequence) -> bool:
        """Make sure that the next position has a block; a request without tokens in flight may preempt the youngest."""
        if seq.planned < len(seq.blocks) * self.pool.positions:
            return True
        while (block := self.pool.take(1)) is None:
            if seq.pending:
                return False
            victim = max(self.running, key=lambda s: s.rank)
            self.counters["preemptions"] += 1
            self._vacate(victim, Phase.WAITING)
            self.queue.push(victim)
            if victim is seq:
                return False
        seq.blocks.extend(block)
        return True

    # --- planning --------------------------------------------------------------------------------------------------------------

    def _plan_all(self, now_ns: int) -> tuple[LaunchPlan, ...]:
        launches: list[LaunchPlan] = []
        while len(self._flights) < self.options.depth:
            plan = self._plan()
            if plan is None:
                break
            launches.append(plan)
        return tuple(launches)

    def _plan(self) -> LaunchPlan | None:
        """One launch: prefill and decode take turns when both have work."""
        first, second = (self._decode, self._prefill) if self._last == "prefill" else (self._prefill, self._decode)
        return first() or second()

    def _prefill(self) -> LaunchPlan | None:
        waiting = sorted((s for s in self.running if s.prefilling), key=lambda s: s.rank)
        if not waiting:
            return None
        wants = [Extent(s.planned, min(s.target - s.planned, self.options.prefill_chunk)) for s in waiting]
        choice = self._planner.prefill(wants, self._budget())
        return self._launch("prefill", choice, waiting) if choice else None

    def _budget(self) -> int:
        """Most prompt tokens of a launch: all it can hold, or what the streams' inter-token target leaves."""
        target = self.options.itl_target_ms
        if not target or all(s.prefilling for s in self.running):
            return self.facts.max_tokens_per_launch
        return self.costs.rows_within(target * 1e6, self.options.min_chunk)

    def _decode(self) -> LaunchPlan | None:
        ready = [s for s in self.running if not s.prefilling and s.to_come > 0 and self._may_run_ahead(s)]
        granted = [s for s in sorted(ready, key=lambda s: s.rank) if s.phase is Phase.RUNNING and self._room(s)]
        granted = [s for s in granted if s.phase is Phase.RUNNING]
        if not granted:
            return None
        granted.sort(key=lambda s: (s.last_plan, s.slot))
        choice = self._planner.decode([s.planned for s in granted])
        return self._launch("decode", choice, granted) if choice else None

    def _may_run_ahead(self, seq: Sequence) -> bool:
        """A sampler with history can take one unknown id from the device, not two."""
        return len(seq.pending) < 2 or not seq.submit.sampling.needs_history

    def _launch(self, kind: Kind, choice: Choice, candidates: list[Sequence]) -> LaunchPlan:
        plan_id = self._plans
        self._plans += 1
        lanes, refs = [], []
        for lane, (index, count) in enumerate(choice.lanes):
            seq = candidates[index]
            lanes.append(seq.take(plan_id, lane, count))
            refs.append(_LaneRef(seq, seq.epoch, count, seq.planned, lanes[-1].emit))
        self._flights[plan_id] = _Flight(kind, choice.submodel.key, tuple(refs))
        self._last = kind
        return LaunchPlan(plan_id, choice.submodel.key, tuple(lanes))


def _times(flight: _Flight, rows: int, useful: int, c: Completion, framework_ns: int) -> LaunchTimes:
    return LaunchTimes(
        phase=flight.kind,
        submodel=flight.submodel,
        rows=rows,
        useful_rows=useful,
        infer_ms=c.infer_ns / 1e6,
        h2d_ms=c.h2d_ns / 1e6,
        d2h_ms=c.d2h_ns / 1e6,
        framework_ms=framework_ns / 1e6,
    )
