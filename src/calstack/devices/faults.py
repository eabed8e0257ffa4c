"""A device that wraps another and goes wrong on purpose: for tests and rehearsals.

Named `faults:DEVICE?OPTIONS`, for example `faults:cpu?at=5:hang` or `faults:null?seed=7&rate=0.05&kinds=retryable,reset`. Options:

- `at=N:KIND,N:KIND`: what happens to the Nth launch submitted (from 1, further attempts counted);
- `seed=`, `rate=`, `kinds=`: each launch goes wrong with this chance, in one of these ways (all but hang and crash unless named);
- `resets=N`: the first N calls of `reset` fail; `slow_ms=`: how long a slow launch is held back.

It has no event descriptor: whoever drives it waits inside `wait`, so that a launch that never ends rings no bell.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from calstack.devices.base import (
    BufferId,
    CalbinHandle,
    ChipMemory,
    Completion,
    Device,
    DeviceInfo,
    DeviceStatus,
    KVMove,
    LaneOutput,
    Launch,
    OpenOptions,
    Ticket,
)
from calstack.errors import DeviceError, DeviceFatal, DeviceNeedsReset, DeviceRetryable, UsageError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["CRASH_CODE", "Fault", "FaultPlan", "FaultsDevice", "open_faults"]

CRASH_CODE = 86  # the exit code of a process whose device crashed it
_OPTIONS = ("at", "seed", "rate", "kinds", "resets", "slow_ms")
_NAP_S = 0.005


class Fault(enum.StrEnum):
    """What may happen to a launch."""

    HANG = "hang"  # it and all behind it never end, until a reset
    BUSY = "busy"  # `submit` raises DeviceRetryable
    RETRYABLE = "retryable"  # it ends with DeviceRetryable
    RESET = "reset"  # it ends with DeviceNeedsReset
    FATAL = "fatal"  # it ends with DeviceFatal
    CRASH = "crash"  # the process ends at once
    SHORT = "short"  # the answer lacks its last lane
    WRONG = "wrong"  # the answer holds an id that no vocabulary has
    NAN = "nan"  # the sampler saw NaN: no token, log-probabilities not a number
    SLOW = "slow"  # the answer is held back


_SOFT = tuple(kind for kind in Fault if kind not in (Fault.HANG, Fault.CRASH, Fault.FATAL))
_ERRORS = {Fault.RETRYABLE: DeviceRetryable, Fault.RESET: DeviceNeedsReset, Fault.FATAL: DeviceFatal}


@dataclasses.dataclass(frozen=True, slots=True)
class FaultPlan:
    """What goes wrong, and when."""

    at: tuple[tuple[int, Fault], ...] = ()  # (launch number from 1, fault)
    seed: int = 0
    rate: float = 0.0
    kinds: tuple[Fault, ...] = _SOFT
    resets: int = 0  # so many calls of reset fail
    slow_ms: float = 50.0

    @staticmethod
    def parse(text: str) -> FaultPlan:
        """The plan of a device name's options. Raises UsageError naming the option that is wrong."""
        values = dict(part.partition("=")[::2] for part in text.split("&") if part)
        for key, value in values.items():
            if key not in _OPTIONS:
                raise UsageError(f"fault option {key!r} is not known", where="--device", remedy=f"use {', '.join(_OPTIONS)}")
            try:
                _READERS[key](value)
            except (ValueError, KeyError) as error:
                raise UsageError(f"fault option {key}={value} cannot be read", where="--device", remedy="see devices/faults.py") from error
        return FaultPlan(**{key: _READERS[key](value) for key, value in values.items()})  # type: ignore[arg-type]  # by its reader


def _kinds(text: str) -> tuple[Fault, ...]:
    return tuple(Fault(word) for word in text.split(","))


def _numbered(text: str) -> tuple[tuple[int, Fault], ...]:
    pairs = (part.partition(":")[::2] for part in text.split(","))
    return tuple((int(number), Fault(kind)) for number, kind in pairs)


_READERS: dict[str, Callable[[str], object]] = {
    "at": _numbered, "seed": int, "rate": float, "kinds": _kinds, "resets": int, "slow_ms": float,
}  # fmt: skip


def open_faults(name: str, options: OpenOptions, opener: Callable[[str, OpenOptions], Device]) -> Device:
    """Open the device that `name` (behind `faults:`) wraps, by `opener`. Raises UsageError."""
    inner, _, plan = name.partition("?")
    return FaultsDevice(opener(inner or "cpu", options), FaultPlan.parse(plan))


class FaultsDevice:
    """See `devices.base.Device`. What is not a fault is the wrapped device's."""

    def __init__(self, inner: Device, plan: FaultPlan) -> None:
        self.inner, self.plan = inner, plan
        self.happened: list[Fault] = []
        self._at = dict(plan.at)
        self._random = random.Random(plan.seed)  # noqa: S311  faults are no secret
        self._count = 0
        self._resets_left = plan.resets
        self._faults: dict[Ticket, Fault] = {}
        self._held: dict[Ticket, tuple[int, Completion]] = {}  # slow ones: given from this time on
        self._hung: Ticket | None = None  # this launch and later ones never end

    def info(self) -> DeviceInfo:
        return self.inner.info()

    def load(self, calbin: Path, *, kv_blocks: int) -> CalbinHandle:
        return self.inner.load(calbin, kv_blocks=kv_blocks)

    def unload(self, calbin: CalbinHandle) -> None:
        self.inner.unload(calbin)

    def alloc(self, nbytes: int, *, pinned: bool = False) -> BufferId:
        return self.inner.alloc(nbytes, pinned=pinned)

    def free(self, buffer: BufferId) -> None:
        self.inner.free(buffer)

    def write(self, buffer: BufferId, data: bytes, offset: int = 0) -> Ticket:
        return self.inner.write(buffer, data, offset)

    def read(self, buffer: BufferId, nbytes: int, offset: int = 0) -> bytes:
        return self.inner.read(buffer, nbytes, offset)

    def kv_move(self, calbin: CalbinHandle, moves: Sequence[KVMove]) -> list[bytes]:
        return self.inner.kv_move(calbin, moves)

    def submit(self, launch: Launch) -> Ticket:
        fault = self._next()
        if fault is Fault.CRASH:
            os._exit(CRASH_CODE)
        if fault is Fault.BUSY:
            self.happened.append(fault)
            raise DeviceRetryable("the device is busy", where="faults")
        ticket = self.inner.submit(launch)
        if fault is not None:
            self.happened.append(fault)
            self._faults[ticket] = fault
            if fault is Fault.HANG and self._hung is None:
                self._hung = ticket
        return ticket

    def give_mask(self, ticket: Ticket, lane: int, mask: npt.NDArray[np.int32] | None) -> None:
        self.inner.give_mask(ticket, lane, mask)

    def wait(self, ticket: Ticket, timeout_s: float) -> Completion | None:
        until = time.monotonic_ns() + int(timeout_s * 1e9)
        if self._hung is not None and ticket >= self._hung:
            time.sleep(timeout_s)
            return None
        done = self._completed(ticket, timeout_s)
        while done is None and ticket in self._held and time.monotonic_ns() < until:
            time.sleep(_NAP_S)
            done = self._completed(ticket, 0.0)
        return done

    def poll(self, ticket: Ticket) -> Completion | None:
        return None if self._hung is not None and ticket >= self._hung else self._completed(ticket, 0.0)

    def event_fd(self) -> int:
        return -1

    def cancel(self, ticket: Ticket) -> bool:
        if not self.inner.cancel(ticket):
            return False
        self._faults.pop(ticket, None)
        return True

    def memory(self) -> tuple[ChipMemory, ...]:
        return self.inner.memory()

    def status(self) -> DeviceStatus:
        return self.inner.status()

    def reset(self) -> None:
        if self._resets_left > 0:
            self._resets_left -= 1
            raise DeviceNeedsReset("the reset failed", where="faults")
        self._hung = None
        self._faults.clear()
        self.inner.reset()

    def close(self) -> None:
        self.inner.close()

    def _next(self) -> Fault | None:
        self._count += 1
        unlucky = self.plan.rate > 0 and self._random.random() < self.plan.rate
        drawn = self._random.choice(self.plan.kinds) if unlucky else None
        return self._at.get(self._count, drawn)

    def _completed(self, ticket: Ticket, timeout_s: float) -> Completion | None:
        now = time.monotonic_ns()
        if ticket in self._held:
            due, _done = self._held[ticket]
            return self._held.pop(ticket)[1] if now >= due else None
        completion = self.inner.wait(ticket, timeout_s)
        if completion is None:
            return None
        fault = self._faults.pop(ticket, None)
        if fault is Fault.SLOW:
            self._held[ticket] = time.monotonic_ns() + int(self.plan.slow_ms * 1e6), completion
            return None
        return completion if fault is None or completion.error is not None else _spoilt(completion, fault)


def _spoilt(done: Completion, fault: Fault) -> Completion:
    """A good completion as the fault leaves it."""
    kind = _ERRORS.get(fault)
    if kind is not None:
        error: DeviceError = kind(f"a launch went wrong ({fault})", where="faults")
        return dataclasses.replace(done, lanes=(), error=error)
    if fault is Fault.SHORT:
        return dataclasses.replace(done, lanes=done.lanes[:-1])
    return dataclasses.replace(done, lanes=tuple(_bad(lane, fault) for lane in done.lanes))


def _bad(lane: LaneOutput, fault: Fault) -> LaneOutput:
    if lane.token == -1:
        return lane
    token = (1 << 31) - 1 if fault is Fault.WRONG else -2
    before = tuple(dataclasses.replace(row, token=token) for row in lane.before)
    if fault is Fault.WRONG:
        return dataclasses.replace(lane, token=token, before=before)
    return dataclasses.replace(lane, token=token, before=before, logprob=math.nan, top_logprobs=tuple(math.nan for _ in lane.top_logprobs))
