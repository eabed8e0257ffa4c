"""Clocks: the engine core reads time only through one of these."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "MonotonicClock", "VirtualClock"]


class Clock(Protocol):
    """A source of monotonic time."""

    def now_ns(self) -> int:
        """Monotonic nanoseconds; comparable only with values of the same clock."""
        ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now_ns(self) -> int:
        return time.monotonic_ns()


class VirtualClock:
    """A clock that moves only when told to: for tests, simulation and replay."""

    def __init__(self, start_ns: int = 0) -> None:
        self._now = start_ns

    def now_ns(self) -> int:
        return self._now

    def advance(self, ns: int) -> None:
        """Move forward by `ns` nanoseconds (not negative)."""
        if ns < 0:
            raise ValueError(f"a clock does not run backwards: {ns}")
        self._now += ns
