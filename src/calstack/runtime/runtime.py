"""A calbin on a device: submits planned launches in order, retries what may be retried, resets what must be reset.

Ends come back in plan order. A launch is a pure function of its inputs and of the KV blocks before it, so after a retryable
failure the launch and everything submitted behind it are simply run again in the same order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from calstack.clock import Clock, MonotonicClock
from calstack.devices.base import ChipMemory, Completion, Device, KVMove, KVMoveKind, LaneInput, Launch, QueueFull, Ticket, TokenFrom
from calstack.errors import CancelledError, DeviceError, DeviceFatal, DeviceNeedsReset, DeviceRetryable
from calstack.runtime.answer import bad_answer
from calstack.runtime.facts import CalbinFacts
from calstack.runtime.plan import DeviceWasReset, LateMask, LaunchDone, LaunchPlan, RuntimeEvent, with_host_token
from calstack.runtime.recorder import FlightRecorder, LaunchRecord

__all__ = ["Runtime", "RuntimeOptions"]

_MILLISECOND = 1_000_000
_REMEMBERED = 16  # more than any queue depth


@dataclasses.dataclass(frozen=True, slots=True)
class RuntimeOptions:
    """Bounds of retry and reset."""

    attempts: int = 4  # of one launch
    backoff_ms: float = 5.0  # before the second attempt, doubling
    max_resets: int = 3  # in a row, without a completed launch between them
    recorder_size: int = 64


@dataclasses.dataclass(slots=True)
class _Flight:
    plan: LaunchPlan
    attempt: int = 1
    ticket: Ticket | None = None


class Runtime:
    """Owns the loaded calbin of one device. Not thread-safe: one thread drives it."""

    def __init__(
        self,
        device: Device,
        calbin: Path,
        facts: CalbinFacts,
        *,
        kv_blocks: int,
        options: RuntimeOptions | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Load `calbin`, whose facts are `facts`, with room for `kv_blocks` KV blocks. Raises ArtifactError when it does not fit."""
        self.device, self.facts = device, facts
        self.kv_blocks = kv_blocks
        self.recorder = FlightRecorder((options or RuntimeOptions()).recorder_size)
        self._options = options or RuntimeOptions()
        self._clock = clock or MonotonicClock()
        self._handle = device.load(calbin, kv_blocks=kv_blocks)
        self._waiting: deque[_Flight] = deque()  # not submitted, in plan order
        self._flying: deque[_Flight] = deque()  # submitted, in plan order
        self._void: deque[Ticket] = deque()  # submitted, their ends are of no interest
        self._tickets: dict[int, Ticket] = {}  # plan id -> ticket of its last submission, while flying
        self._sampled: dict[int, tuple[int, ...]] = {}  # plan id -> ids, of the last launches that ended, for retries behind them
        self._events: deque[RuntimeEvent] = deque()
        self._not_before_ns = 0
        self._resets = 0
        self.retries = 0
        self.resets = 0

    # --- for the engine's driver ---------------------------------------------------------------------------------------------

    def submit(self, plan: LaunchPlan) -> None:
        """Take a plan; it reaches the device at once or as soon as the queue and back-off allow."""
        self._waiting.append(_Flight(plan))
        self._pump()

    def give_mask(self, late: LateMask) -> None:
        """The mask of a lane planned with `late_mask`: kept for further attempts, and given to the device if the launch is there."""
        flight = next((f for f in (*self._flying, *self._waiting) if f.plan.id == late.plan), None)
        if flight is None:
            return
        lanes = list(flight.plan.lanes)
        lanes[late.lane] = dataclasses.replace(lanes[late.lane], mask=late.mask, late_mask=False)
        flight.plan = dataclasses.replace(flight.plan, lanes=tuple(lanes))
        if flight.ticket is not None:
            self.device.give_mask(flight.ticket, late.lane, late.mask)

    def collect(self) -> list[RuntimeEvent]:
        """All ends known by now, in plan order. Never blocks. Raises DeviceFatal when the device is lost."""
        self._reap_void()
        while self._flying:
            flight = self._flying[0]
            completion = self.device.poll(_ticket(flight))
            if completion is None:
                break
            self._end(flight, completion)
        self._pump()
        events = list(self._events)
        self._events.clear()
        return events

    def wait(self, timeout_s: float) -> None:
        """Block until the oldest launch may have ended, a back-off is over, or `timeout_s` has passed."""
        if self._events:
            return
        ticket = self._void[0] if self._void else (_ticket(self._flying[0]) if self._flying else None)
        if ticket is None:
            if self._waiting:
                time.sleep(min(timeout_s, max(self._not_before_ns - self._clock.now_ns(), 0) / 1e9))
                self._pump()
            return
        completion = self.device.wait(ticket, timeout_s)
        if completion is None:
            return
        if self._void:
            self._void.popleft()
        else:
            self._end(self._flying[0], completion)
        self._pump()

    @property
    def has_events(self) -> bool:
        """True when `collect` would return something without asking the device."""
        return bool(self._events)

    @property
    def in_flight(self) -> int:
        """Launches taken and not ended."""
        return len(self._waiting) + len(self._flying)

    @property
    def oldest(self) -> int:
        """Plan id of the oldest launch not ended, or -1."""
        queue = self._flying or self._waiting
        return queue[0].plan.id if queue else -1

    @property
    def wake_ns(self) -> int | None:
        """When a back-off ends, if one holds launches back and no device event will come before."""
        return self._not_before_ns if self._waiting and not self._flying and not self._void else None

    def clear_blocks(self, blocks: Sequence[int]) -> None:
        """Give the memory of free KV blocks back."""
        if blocks:
            self.device.kv_move(self._handle, [KVMove(kind=KVMoveKind.CLEAR, dst=block) for block in blocks])

    def run_alone(self, submodel: str, lanes: tuple[LaneInput, ...], *, timeout_s: float = 60.0) -> Completion:
        """Run one launch to its end, outside the engine's queue (which must be empty). Raises what the launch ends with."""
        ticket = self.device.submit(Launch(calbin=self._handle, submodel=submodel, lanes=lanes))
        completion = self.device.wait(ticket, timeout_s)
        if completion is None:
            raise DeviceFatal(f"a launch did not end within {timeout_s:.0f} s", where=submodel, remedy="restart the engine")
        if completion.error is not None:
            raise completion.error
        return completion

    def reset(self, cause: DeviceError) -> None:
        """Reset the device; `collect` then gives DeviceWasReset. Raises DeviceFatal when it goes on failing."""
        self.resets += 1
        lost = [*self._void, *(_ticket(flight) for flight in self._flying)]
        self._waiting.clear()
        self._flying.clear()
        self._void.clear()
        self._tickets.clear()
        self._sampled.clear()
        self._reset_device()
        for ticket in lost:
            with contextlib.suppress(DeviceError):  # a device may have forgotten it
                self.device.poll(ticket)
        self._events.append(DeviceWasReset(cause))

    def memory(self) -> tuple[ChipMemory, ...]:
        """Bytes per chip right now."""
        return self.device.memory()

    def close(self) -> None:
        """Unload the calbin. Launches in flight are cancelled or waited for, at most a few seconds each."""
        for flight in self._flying:
            self._drop(flight)
        self._flying.clear()
        self._waiting.clear()
        while self._void:
            self.device.wait(self._void.popleft(), 5.0)
        self.device.unload(self._handle)

    # --- inside ----------------------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Submit what waits, in order, while the device takes it and no back-off or void launch is in the way."""
        while self._waiting and not self._void and self._clock.now_ns() >= self._not_before_ns:
            flight = self._waiting[0]
            try:
                flight.ticket = self.device.submit(self._launch(flight.plan))
            except QueueFull:
                if not self._flying:  # someone else fills the queue: look again soon, not at once
                    self._not_before_ns = self._clock.now_ns() + _MILLISECOND
                return
            except DeviceRetryable as error:
                self._fail(flight, error)
            except DeviceNeedsReset as error:
                self._reset(error)
            except DeviceFatal:
                raise
            except DeviceError as error:
                self._waiting.popleft()
                self._give_up(flight, error)
            else:
                self._waiting.popleft()
                self._flying.append(flight)
                self._tickets[flight.plan.id] = flight.ticket

    def _taken(self, plan: LaunchPlan) -> tuple[int, ...]:
        """The ids that its lanes took from earlier launches, -1 where none, for the recorder."""
        return tuple(
            self._sampled[lane.tokens.ticket][lane.tokens.lane]
            if isinstance(lane.tokens, TokenFrom) and lane.tokens.ticket in self._sampled
            else -1
            for lane in plan.lanes
        )

    def _launch(self, plan: LaunchPlan) -> Launch:
        return Launch(calbin=self._handle, submodel=plan.submodel, lanes=tuple(self._lane(lane) for lane in plan.lanes))

    def _lane(self, lane: LaneInput) -> LaneInput:
        source = lane.tokens
        if not isinstance(source, TokenFrom):
            return lane
        ticket = self._tickets.get(source.ticket)
        if ticket is not None:
            return lane.with_tokens(TokenFrom(ticket, source.lane), lane.output_history)
        ids = self._sampled.get(source.ticket)
        if ids is None:
            raise DeviceError("a launch takes a token from one that failed", where=f"plan {source.ticket}")
        return with_host_token(lane, ids[source.lane])

    def _end(self, flight: _Flight, completion: Completion) -> None:
        """Act on the end of the oldest flying launch."""
        error = completion.error or bad_answer(flight.plan, completion, self.facts.vocab)
        if error is None:
            self._flying.popleft()
            self._tickets.pop(flight.plan.id, None)
            self._sampled[flight.plan.id] = tuple(lane.token for lane in completion.lanes)
            if len(self._sampled) > _REMEMBERED:
                del self._sampled[next(iter(self._sampled))]
            self._resets = 0
            self.recorder.add(LaunchRecord(flight.plan, flight.attempt, completion, taken=self._taken(flight.plan)))
            self._events.append(LaunchDone(flight.plan.id, completion))
        elif isinstance(error, DeviceNeedsReset):
            self._reset(error)
        elif isinstance(error, DeviceFatal):
            self._record(flight, error)
            raise error
        else:
            self._void_behind()
            self._fail(flight, error if isinstance(error, DeviceError) else DeviceError(str(error), where=flight.plan.submodel))

    def _drop(self, flight: _Flight) -> None:
        """Cancel a flying launch, or let it run to an end that is ignored."""
        if not self.device.cancel(_ticket(flight)):
            for index, lane in enumerate(flight.plan.lanes):
                if lane.late_mask:
                    self.device.give_mask(_ticket(flight), index, None)
        self._void.append(_ticket(flight))

    def _void_behind(self) -> None:
        """Take back the oldest flying launch (ended) and all behind it: cancelled or let run, their ends are ignored."""
        flights = list(self._flying)
        self._flying.clear()
        for flight in flights[1:]:
            self._drop(flight)
        for flight in flights:
            flight.ticket = None
            self._tickets.pop(flight.plan.id, None)
        self._waiting.extendleft(reversed(flights))

    def _fail(self, flight: _Flight, error: DeviceError) -> None:
        """The launch at the head of the waiting queue failed: back off for another attempt, or give it up."""
        self._record(flight, error)
        if isinstance(error, DeviceRetryable) and flight.attempt < self._options.attempts:
            self._not_before_ns = self._clock.now_ns() + int(self._options.backoff_ms * 1e6 * 2 ** (flight.attempt - 1))
            flight.attempt += 1
            self.retries += 1
            return
        self._waiting.popleft()
        self._give_up(flight, error)

    def _give_up(self, flight: _Flight, error: DeviceError) -> None:
        self._events.append(LaunchDone(flight.plan.id, None, error))

    def _record(self, flight: _Flight, error: Exception) -> None:
        self.recorder.add(LaunchRecord(flight.plan, flight.attempt, None, str(error)))

    def _reap_void(self) -> None:
        while self._void and self.device.poll(self._void[0]) is not None:
            self._void.popleft()

    def _reset(self, cause: DeviceError) -> None:
        """Reset the device; every launch is lost. Raises DeviceFatal when resets do not help."""
        self._resets += 1
        if self._resets > self._options.max_resets:
            raise DeviceFatal(f"{self._options.max_resets} resets in a row did not help: {cause.what}", where=cause.where)
        self.reset(cause)

    def _reset_device(self) -> None:
        """Reset, and try again when that fails; DeviceFatal when it goes on failing."""
        for attempt in range(self._options.max_resets):
            try:
                self.device.reset()
            except DeviceFatal:
                raise
            except DeviceError as error:
                if attempt + 1 == self._options.max_resets:
                    raise DeviceFatal(f"reset failed: {error.what}", where=error.where, remedy="restart the engine") from error
            else:
                return


def _ticket(flight: _Flight) -> Ticket:
    if flight.ticket is None:
        raise CancelledError("a launch without a ticket is not in flight")
    return flight.ticket
