"""The core of an encoder: texts of waiting requests are put together into launches; nothing is kept between them.

The same kind of state machine as `core`, and driven the same way: `step(now, events) → launches, outputs`.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from calstack.devices.base import Completion, LaneInput, LaneOutput
from calstack.engine.costs import StepCosts
from calstack.engine.kv import BlockPool
from calstack.engine.options import EngineOptions
from calstack.engine.result import StepResult, error_value, taken
from calstack.errors import (
    CalstackError,
    ContextSizeError,
    DeadlineError,
    DeviceError,
    NotInCalbin,
    OverloadedError,
    RequestError,
    UnavailableError,
)
from calstack.runtime.facts import CalbinFacts, Extent
from calstack.runtime.plan import DeviceWasReset, LaunchDone, LaunchPlan
from calstack.specs import Role
from calstack.wire import Cancel, Drain, Encode, Encoded, Finish, LaunchTimes, Submit, TokenOut

if TYPE_CHECKING:
    from calstack.engine.core import CoreEvent
    from calstack.runtime.facts import SubmodelFacts

__all__ = ["EncodeCore"]


@dataclasses.dataclass(slots=True, eq=False)
class _Job:
    """A request: its texts, those still to be launched, and what came back."""

    message: Encode
    order: int
    arrived_ns: int
    deadline_ns: int
    todo: deque[int]
    outputs: list[LaneOutput | None]
    begun_ns: int = 0
    left: int = 0
    restarts: int = 0
    ended: bool = False

    @property
    def tokens(self) -> int:
        """Of its texts that wait."""
        return sum(len(self.message.texts[i]) for i in self.todo)


@dataclasses.dataclass(frozen=True, slots=True)
class _Flight:
    submodel: str
    lanes: tuple[tuple[_Job, int], ...]  # request and number of the text
    rows: int


class _Queue(deque[_Job]):
    """Requests with texts to launch."""

    @property
    def tokens(self) -> int:
        """Of all texts that wait."""
        return sum(job.tokens for job in self)


class EncodeCore:
    """Batches texts over one encoder. All time comes in as `now_ns`."""

    def __init__(self, facts: CalbinFacts, *, options: EngineOptions | None = None) -> None:
        self.facts, self.options = facts, options or EngineOptions()
        self.context, self.max_lanes = facts.context, facts.max_lanes
        self.counters: Counter[str] = Counter()
        self.pool = BlockPool(0, facts.block_positions)
        self.queue = _Queue()
        self.costs = StepCosts()
        self.draining = False
        self._submodels = facts.of_role(Role.ENCODE)
        self._alone: deque[tuple[_Job, int]] = deque()  # tried again by themselves
        self._live: dict[str, _Job] = {}
        self._flights: dict[int, _Flight] = {}
        self._deadlines: list[tuple[int, int, str]] = []
        self._done: list[Encoded] = []
        self._refused: list[TokenOut] = []
        self._ended: list[tuple[Completion, LaunchTimes]] = []
        self._orders = self._plans = 0
        self._work_ns = self._device_ns = 0

    # --- the one entry ---------------------------------------------------------------------------------------------------------

    def step(self, now_ns: int, events: Iterable[CoreEvent] = ()) -> StepResult:
        """Take events, end what is due, plan launches up to the depth."""
        for event in events:
            self._take(event, now_ns)
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            _, order, request = heapq.heappop(self._deadlines)
            if (job := self._live.get(request)) is not None and job.order == order:
                self._end(job, now_ns, DeadlineError("the deadline passed"))
        launches = tuple(self._plan_all(now_ns))
        return StepResult(
            launches=launches,
            tokens=taken(self._refused),
            encoded=taken(self._done),
            ended=taken(self._ended),
            grammars=(),
            masks=(),
            free_blocks=(),
            wake_ns=self._deadlines[0][0] if self._deadlines else None,
            work=bool(self._live),
        )

    @property
    def idle(self) -> bool:
        """True when no request is known and no launch is in flight."""
        return not self._live and not self._flights

    @property
    def running(self) -> list[tuple[object, int]]:
        """Texts in flight."""
        return [lane for flight in self._flights.values() for lane in flight.lanes]

    def patience_ns(self, plan: int) -> int:
        """How long a launch in flight may take before the device counts as hung."""
        flight, options = self._flights.get(plan), self.options
        expected = self.costs.expected_ns(flight.submodel, flight.rows, prefill=True) if flight is not None else None
        if expected is None:
            return int(options.launch_timeout_s * 1e9)
        return int(max(options.hang_s * 1e9, options.hang_factor * expected))

    def kv_wait_ns(self, now_ns: int) -> int:
        """Nobody waits for KV blocks."""
        del now_ns
        return 0

    # --- events ----------------------------------------------------------------------------------------------------------------

    def _take(self, event: CoreEvent, now_ns: int) -> None:
        match event:
            case Encode():
                self._accept(event, now_ns)
            case Submit():
                error = error_value(NotInCalbin("an encoder generates nothing"))
                self._refused.append(TokenOut(request=event.request, finish=Finish(reason="error", error=error)))
            case Cancel():
                if (job := self._live.get(event.request)) is not None:
                    self._forget(job)
            case LaunchDone():
                self._launch_done(event, now_ns)
            case DeviceWasReset():
                self._reset(event.cause, now_ns)
            case Drain():
                self.draining = True
            case _:
                raise AssertionError(f"an encoder asks for no {type(event).__name__}")

    def _accept(self, message: Encode, now_ns: int) -> None:
        if message.request in self._live:
            self.counters["duplicates"] += 1
            return
        try:
            self._check(message)
        except CalstackError as error:
            self.counters["refused"] += 1
            self._done.append(Encoded(request=message.request, error=error_value(error)))
            return
        if not self._live:
            self._work_ns = now_ns
        self._orders += 1
        count = len(message.texts)
        deadline = now_ns + message.deadline_ms * 1_000_000 if message.deadline_ms else 0
        job = _Job(message, self._orders, now_ns, deadline, deque(range(count)), [None] * count, left=count)
        self._live[message.request] = job
        self.queue.append(job)
        self.counters["accepted"] += 1
        if deadline:
            heapq.heappush(self._deadlines, (deadline, job.order, message.request))

    def _check(self, message: Encode) -> None:
        if self.draining:
            raise UnavailableError("the engine is draining")
        if not message.texts or len(message.second) not in {0, len(message.texts)}:
            raise RequestError("has no text, or not one second segment for each", where=message.request)
        for number, ids in enumerate(message.texts):
            if len(ids) > self.context:
                raise ContextSizeError(n_prompt_tokens=len(ids), n_ctx=self.context)
            if not ids or min(ids) < 0 or max(ids) >= self.facts.vocab:
                raise RequestError("is empty, or an id lies outside the vocabulary", where=f"$.input[{number}]", param="input")
            if message.second and not 0 <= message.second[number] < len(ids):
                raise RequestError("its second segment begins outside it", where=f"$.input[{number}]", param="input")
        if any(message.second) and self.facts.types < 2:
            raise NotInCalbin("the model has no second segment, so it takes no pairs")
        waiting = self.queue.tokens
        full = len(self._live) >= self.options.max_queued_requests
        if full or (waiting and waiting + sum(map(len, message.texts)) > self.options.max_queued_tokens):
            raise OverloadedError("the queue is full", retry_after=max(1.0, waiting * self.costs.row_ns / 1e9))

    def _reset(self, cause: DeviceError, now_ns: int) -> None:
        """Launches in flight are lost: their texts are launched again."""
        self.counters["resets"] += 1
        lost = [lane for flight in self._flights.values() for lane in flight.lanes]
        self._flights.clear()
        for job in dict.fromkeys(job for job, _ in lost if not job.ended):
            job.restarts += 1
            if job.restarts > self.options.max_restarts:
                self._end(job, now_ns, UnavailableError(f"the device failed again and again: {cause.what}"))
        for job, number in reversed(lost):
            if not job.ended:
                self._again(job, number)

    def _again(self, job: _Job, number: int) -> None:
        if not job.todo:
            self.queue.appendleft(job)
        job.todo.appendleft(number)

    # --- launches --------------------------------------------------------------------------------------------------------------

    def _plan_all(self, now_ns: int) -> Iterator[LaunchPlan]:
        while len(self._flights) < self.options.depth and (lanes := self._choose()):
            submodel = self._smallest(lanes)
            for job, _ in lanes:
                job.begun_ns = job.begun_ns or now_ns
            self._plans += 1
            rows = sum(len(job.message.texts[number]) for job, number in lanes)
            self._flights[self._plans] = _Flight(submodel.key, tuple(lanes), rows)
            yield LaunchPlan(self._plans, submodel.key, tuple(_lane(job, number) for job, number in lanes))

    def _choose(self) -> list[tuple[_Job, int]]:
        """The next launch's texts: one of each request in turn, so that a long list holds nobody up, while there is room."""
        while self._alone:
            if not (lane := self._alone.popleft())[0].ended:
                return [lane]
        largest = self._submodels[-1]
        lanes: list[tuple[_Job, int]] = []
        rows, unfit = 0, 0
        while self.queue and len(lanes) < largest.batch and unfit < len(self.queue):
            job = self.queue[0]
            size = len(job.message.texts[job.todo[0]])
            if rows + size > largest.rows:
                self.queue.rotate(-1)
                unfit += 1
                continue
            rows, unfit = rows + size, 0
            lanes.append((job, job.todo.popleft()))
            self.queue.popleft()
            if job.todo:
                self.queue.append(job)
        return lanes

    def _smallest(self, lanes: list[tuple[_Job, int]]) -> SubmodelFacts:
        extents = [Extent(0, len(job.message.texts[number])) for job, number in lanes]
        return next(submodel for submodel in self._submodels if submodel.fits(extents))

    def _launch_done(self, done: LaunchDone, now_ns: int) -> None:
        flight = self._flights.pop(done.id, None)
        if flight is None:
            return
        if done.completion is None:
            self._failed(flight, done.error or DeviceError("the launch failed", where=flight.submodel), now_ns)
            return
        useful = sum(len(job.message.texts[number]) for job, number in flight.lanes if not job.ended)
        self._account(flight, done.completion, useful)
        for (job, number), output in zip(flight.lanes, done.completion.lanes, strict=True):
            if job.ended:
                continue
            if not _sound(output):
                self._end(job, now_ns, DeviceError("the device gave no numbers for a text", where=flight.submodel))
                continue
            job.outputs[number] = output
            job.left -= 1
            if not job.left:
                self._end(job, now_ns)

    def _failed(self, flight: _Flight, error: DeviceError, now_ns: int) -> None:
        """A launch failed for good. Of several texts each is tried again by itself, so that only the guilty request ends."""
        self.counters["failed_launches"] += 1
        for job, number in flight.lanes:
            if job.ended:
                continue
            if len(flight.lanes) == 1:
                self._end(job, now_ns, error)
            else:
                self._alone.append((job, number))

    def _account(self, flight: _Flight, c: Completion, useful: int) -> None:
        busy = c.h2d_ns + c.infer_ns + c.d2h_ns
        framework = max(0, c.finished_ns - busy - max(self._device_ns, self._work_ns))
        self._device_ns = c.finished_ns
        self.counters["encode_rows"] += flight.rows
        self.counters["padding_rows"] += flight.rows - useful
        self.costs.prefill(flight.rows, busy)
        times = LaunchTimes(
            phase="encode",
            submodel=flight.submodel,
            rows=flight.rows,
            useful_rows=useful,
            infer_ms=c.infer_ns / 1e6,
            h2d_ms=c.h2d_ns / 1e6,
            d2h_ms=c.d2h_ns / 1e6,
            framework_ms=framework / 1e6,
        )
        self._ended.append((c, times))

    # --- ends ------------------------------------------------------------------------------------------------------------------

    def _end(self, job: _Job, now_ns: int, error: CalstackError | None = None) -> None:
        self._forget(job)
        self.counters["ended_error" if error else "ended_stop"] += 1
        queue_ms = ((job.begun_ns or now_ns) - job.arrived_ns) / 1e6
        if error is not None:
            self._done.append(Encoded(request=job.message.request, error=error_value(error), queue_ms=queue_ms))
            return
        outputs = [out for out in job.outputs if out is not None]
        self._done.append(
            Encoded(
                request=job.message.request,
                embeddings=tuple(_bytes(out.embedding) for out in outputs if out.embedding is not None),
                scores=tuple(_bytes(out.scores) for out in outputs if out.scores is not None),
                queue_ms=queue_ms,
            )
        )

    def _forget(self, job: _Job) -> None:
        job.ended = True
        del self._live[job.message.request]
        if job.todo:
            self.queue.remove(job)
            job.todo.clear()


def _lane(job: _Job, number: int) -> LaneInput:
    ids = job.message.texts[number]
    second = job.message.second[number] if job.message.second else 0
    types = (0,) * second + (1,) * (len(ids) - second) if second else ()
    return LaneInput(past_len=0, cur_len=len(ids), blocks=(), tokens=ids, types=types)


def _sound(output: LaneOutput) -> bool:
    found = [value for value in (output.embedding, output.scores) if value is not None]
    return bool(found) and all(bool(np.isfinite(value).all()) for value in found)


def _bytes(values: np.ndarray[tuple[int], np.dtype[np.float32]]) -> bytes:
    return np.ascontiguousarray(values, "<f4").tobytes()
