"""The engine core: one synchronous state machine, `step(now, events) → launches, outputs`.

It knows no thread, socket or wall clock. Launches run on the device in the order they are planned, so a lane may take its input
token from a launch that has not ended, and blocks may change hands while a launch that writes to them is still in flight.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from typing import Literal

from calstack.devices.base import Completion, LaneOutput, RowOutput
from calstack.engine.admission import check_submit, output_limit
from calstack.engine.constraints import GrammarReady
from calstack.engine.costs import StepCosts, wait_estimate_s
from calstack.engine.flight import Flight, LaneRef, note_costs, times_of
from calstack.engine.guessing import settle
from calstack.engine.kv import BlockPool
from calstack.engine.lanes import Lanes
from calstack.engine.options import EngineOptions
from calstack.engine.result import Outbox, StepResult, error_value, taken
from calstack.engine.sequence import Phase, Sequence
from calstack.engine.steps import Steps
from calstack.errors import CalstackError, DeadlineError, DeviceError, OverloadedError, UnavailableError
from calstack.runtime.facts import CalbinFacts
from calstack.runtime.plan import DeviceWasReset, LateMask, LaunchDone, RuntimeEvent
from calstack.window import Window
from calstack.wire import Cancel, Drain, Encode, Finish, LaunchTimes, Submit, TokenLogprob

__all__ = ["Core", "CoreEvent"]

CoreEvent = Submit | Encode | Cancel | Drain | GrammarReady | RuntimeEvent


class Core:
    """Continuous batching over one calbin. All time comes in as `now_ns`."""

    def __init__(self, facts: CalbinFacts, *, kv_blocks: int, options: EngineOptions | None = None) -> None:
        self.facts, self.options = facts, options or EngineOptions()
        self.context = min(facts.context, kv_blocks * facts.block_positions)
        self.max_lanes = min(self.options.max_lanes or facts.max_lanes, facts.max_lanes)
        cache = self.options.prefix_cache_bytes // max(facts.bytes_per_block, 1) if self.options.prefix_cache else 0
        self.counters: Counter[str] = Counter()
        self.lanes = Lanes(self.max_lanes, BlockPool(kv_blocks, facts.block_positions, cache_limit=cache), self.counters)
        self.pool, self.queue = self.lanes.pool, self.lanes.queue
        self.costs = StepCosts()
        self._steps = Steps(facts, self.options, self.lanes, self.costs)
        self.draining = False
        self._live: dict[str, Sequence] = {}
        self._preparing: dict[str, Sequence] = {}  # those whose grammar is being built
        self._grammars: list[Submit] = []  # to be built
        self._masks: list[LateMask] = []
        self._deadlines: list[tuple[int, int, str]] = []
        self._out = Outbox()
        self._ended: list[tuple[Completion, LaunchTimes]] = []
        self._orders = 0
        self._work_ns = self._device_ns = 0  # work exists since; the last launch ended at

    # --- the one entry ---------------------------------------------------------------------------------------------------------

    def step(self, now_ns: int, events: Iterable[CoreEvent] = ()) -> StepResult:
        """Take events, end what is due, plan launches up to the depth."""
        for event in events:
            self._take(event, now_ns)
        self._expire(now_ns)
        self.lanes.admit(now_ns)
        launches = self._steps.plan()
        freed: list[int] = []
        if self.idle:
            self.counters["leaks"] += self.lanes.leaks()
            freed = self.pool.uncommitted()
        return StepResult(
            launches=launches,
            encoded=self._out.take_encoded(),
            tokens=self._out.take(),
            ended=taken(self._ended),
            grammars=taken(self._grammars),
            masks=(*taken(self._masks), *(LateMask(*lane, None) for lane in taken(self.lanes.abandoned))),
            free_blocks=tuple(freed),
            wake_ns=self._wake(),
            work=bool(self._live),
        )

    @property
    def idle(self) -> bool:
        """True when no request is known and no launch is in flight."""
        return not self._live and not self._steps.flights

    @property
    def running(self) -> list[Sequence]:
        """Requests that hold a lane."""
        return self.lanes.running

    @property
    def in_flight(self) -> int:
        """Launches planned and not ended."""
        return len(self._steps.flights)

    def patience_ns(self, plan: int) -> int:
        """How long a launch in flight may take before the device counts as hung."""
        flight, options = self._steps.flights.get(plan), self.options
        expected = flight.expected_ns(self.costs) if flight is not None else None
        if expected is None:
            return int(options.launch_timeout_s * 1e9)
        return int(max(options.hang_s * 1e9, options.hang_factor * expected))

    def kv_wait_ns(self, now_ns: int) -> int:
        """How long the head of the queue has been waiting for blocks."""
        return now_ns - self.lanes.blocked_ns if self.lanes.blocked is not None else 0

    # --- events ----------------------------------------------------------------------------------------------------------------

    def _take(self, event: CoreEvent, now_ns: int) -> None:
        match event:
            case Submit():
                self._submit(event, now_ns)
            case Encode():
                self._out.refuse(event)
            case Cancel():
                seq = self._live.get(event.request)
                if seq is not None:
                    self._end(seq, "cancelled", now_ns)
            case GrammarReady():
                self._prepared(event, now_ns)
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
        limit = output_limit(submit, self.context)
        window = Window.of(self.context, submit.keep, len(submit.prompt)) if submit.overflow == "shift" else None
        seq = Sequence(submit, order=self._orders, now_ns=now_ns, limit=limit, stops=stops, window=window)
        self._live[submit.request] = seq
        self.counters["accepted"] += 1
        self.queue.push(seq)
        if len(seq.output) >= seq.limit:
            self._end(seq, "length", now_ns)
            return
        if seq.deadline_ns:
            heapq.heappush(self._deadlines, (seq.deadline_ns, seq.order, seq.request))
        if submit.grammar:
            self._prepare(seq)
        self.lanes.admit(now_ns)

    def _prepare(self, seq: Sequence) -> None:
        """Ask for the request's grammar; until it is there nobody waits behind the request."""
        self.queue.remove(seq)
        seq.phase = Phase.PREPARING
        self._preparing[seq.request] = seq
        self._grammars.append(seq.submit)

    def _prepared(self, ready: GrammarReady, now_ns: int) -> None:
        seq = self._preparing.get(ready.submit.request)
        if seq is None or seq.submit is not ready.submit:
            return  # it has ended meanwhile
        if ready.constraint is None:
            self._end(seq, "error", now_ns, error=ready.error or CalstackError("the grammar was not built"))
        elif ready.mask is None:
            self._end(seq, "stop", now_ns)
        else:
            del self._preparing[seq.request]
            seq.constrain(ready.constraint, ready.mask)
            seq.phase = Phase.WAITING
            self.queue.push(seq)
            self.lanes.admit(now_ns)

    def _check(self, submit: Submit) -> None:
        check_submit(submit, self.facts, context=self.context, options=self.options)
        if self.draining:
            raise UnavailableError("the engine is draining")
        if submit.output:
            return  # resumed: it was accepted before
        full = len(self.queue) + len(self._preparing) >= self.options.max_queued_requests
        if full or (self.queue.tokens + len(submit.prompt) > self.options.max_queued_tokens and len(self.queue) > 0):
            raise OverloadedError("the queue is full", retry_after=max(self.retry_after_s(), 1.0))

    def retry_after_s(self) -> float:
        """Estimated seconds until a request at the tail of the queue would start."""
        share = self.costs.output_share
        return wait_estimate_s(self.costs, self.max_lanes, [s.work(share) for s in self.running], [s.work(share) for s in self.queue])

    def _reset(self, cause: DeviceError, now_ns: int) -> None:
        """KV is gone and so are the launches in flight: every running request starts over from its known ids."""
        self.counters["resets"] += 1
        self._steps.flights.clear()
        for seq in sorted(self.running, key=lambda s: s.rank):
            self._restart(seq, cause, now_ns)
        self.pool.forget()

    # --- ends ------------------------------------------------------------------------------------------------------------------

    def _done(self, done: LaunchDone, now_ns: int) -> None:
        flight = self._steps.flights.pop(done.id, None)
        if flight is None:
            return
        if done.completion is None:
            self._failed(flight, done.error or DeviceError("the launch failed", where=flight.submodel), now_ns)
            return
        useful = sum(lane.count - len(lane.guesses) for lane in flight.lanes if lane.live)
        for lane, output in zip(flight.lanes, done.completion.lanes, strict=True):
            if lane.live:
                useful += self._lane_done(lane, output, now_ns)
        self._account(flight, done.completion, useful)

    def _failed(self, flight: Flight, error: DeviceError, now_ns: int) -> None:
        """A launch failed for good. Of several requests each is tried again by itself, so that only the guilty one ends."""
        self.counters["failed_launches"] += 1
        for lane in flight.lanes:
            if lane.live and len(flight.lanes) == 1:
                self._end(lane.seq, "error", now_ns, error=error)
            elif lane.live:
                lane.seq.solo = True
                self._restart(lane.seq, error, now_ns)

    def _restart(self, seq: Sequence, cause: DeviceError, now_ns: int) -> None:
        """Queue a running request to start over from its known ids, a bounded number of times."""
        seq.restarts += 1
        if seq.restarts > self.options.max_restarts:
            self._end(seq, "error", now_ns, error=UnavailableError(f"the device failed again and again: {cause.what}"))
        else:
            self.lanes.requeue(seq)

    def _lane_done(self, lane: LaneRef, output: LaneOutput, now_ns: int) -> int:
        """Take what a lane gave; how many of its guesses came true."""
        seq = lane.seq
        seq.done = lane.end - len(lane.guesses)
        self.lanes.publish(seq)
        if seq.scored and output.logits is not None:
            self._out.prompt(seq.request, *lane.scores(output.logits))
        if not lane.emit:
            return 0
        seq.solo = seq.submit.alone
        seq.first_token_ns = seq.first_token_ns or now_ns
        accepted = 0
        rows: list[RowOutput | LaneOutput] = [*output.before, output]
        for row, guess in zip(rows, (*lane.guesses, None), strict=True):
            seq.pending.popleft()
            self._row_done(seq, row, now_ns)
            if row.token != guess or not lane.live:
                break
            accepted += 1
        if lane.guesses:
            settle(lane, accepted, self.counters)
            self.lanes.publish(seq)
        else:
            seq.acceptance.forgive()
        return accepted

    def _row_done(self, seq: Sequence, row: RowOutput | LaneOutput, now_ns: int) -> None:
        """Take one sampled id."""
        if row.token in seq.stops:
            self._end(seq, "stop", now_ns, stop_id=row.token)
            return
        if not self._learn(seq, row.token, now_ns):
            return
        self.counters["tokens"] += 1
        logprob = None
        if seq.submit.top_logprobs >= 0:
            logprob = TokenLogprob(logprob=row.logprob, top_ids=row.top_ids, top_logprobs=row.top_logprobs)
        self._out.token(seq.request, row.token, logprob)
        if seq.constraint is not None and seq.mask is None:
            self._end(seq, "stop", now_ns)
        elif len(seq.output) >= seq.limit:
            self._end(seq, "length", now_ns)
        elif seq.full:
            self.counters["shifts"] += 1
            self.lanes.requeue(seq)  # it starts over from the ids that stay: exact, where moving K and V would not be
        elif seq.unmasked:
            self._masks.append(LateMask(*seq.unmasked.popleft(), seq.mask))

    def _learn(self, seq: Sequence, token: int, now_ns: int) -> bool:
        """Take an id that does not end the request; False when the request has ended because it cannot go on."""
        try:
            if token < 0:
                raise DeviceError("the sampler found no token", where=seq.request)
            seq.learn(token)
        except CalstackError as error:
            self._end(seq, "error", now_ns, error=error)
            return False
        return True

    def _account(self, flight: Flight, c: Completion, useful: int) -> None:
        busy = c.h2d_ns + c.infer_ns + c.d2h_ns
        framework = max(0, c.finished_ns - busy - max(self._device_ns, self._work_ns))
        self._device_ns = c.finished_ns
        note_costs(flight, busy, framework, useful, self.costs, self.counters, self.running)
        self._ended.append((c, times_of(flight, flight.rows, useful, c, framework)))

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
        self._preparing.pop(seq.request, None)
        usage = seq.usage(now_ns, extra=1 if reason == "stop" else 0)
        self.lanes.vacate(seq, Phase.ENDED)
        del self._live[seq.request]
        if reason in ("stop", "length"):
            self.costs.ended(len(seq.output), seq.limit)
        self.counters[f"ended_{reason}"] += 1
        value = error_value(error) if error else None
        self._out.finish(seq.request, Finish(reason=reason, stop_id=stop_id, error=value, usage=usage))

    def _expire(self, now_ns: int) -> None:
        """End requests whose deadline has passed, and a head of the queue that has waited too long for blocks."""
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            _, order, request = heapq.heappop(self._deadlines)
            seq = self._live.get(request)
            if seq is not None and seq.order == order:
                self._end(seq, "error", now_ns, error=DeadlineError("the deadline passed"))
        limit, head = self.options.kv_wait_timeout_s, self.lanes.blocked
        if limit and head is not None and self.kv_wait_ns(now_ns) > limit * 1e9:
            error = OverloadedError(f"no KV blocks within {limit:.0f} s", retry_after=max(self.retry_after_s(), 1.0))
            self._end(head, "error", now_ns, error=error)

    def _wake(self) -> int | None:
        times = [self._deadlines[0][0]] if self._deadlines else []
        if self.lanes.blocked is not None and self.options.kv_wait_timeout_s:
            times.append(self.lanes.blocked_ns + int(self.options.kv_wait_timeout_s * 1e9) + 1)
        return min(times, default=None)
