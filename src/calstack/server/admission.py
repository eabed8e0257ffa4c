"""How much work is accepted: bounds in choices and in prompt tokens, and when a refused client should come back."""

from __future__ import annotations

import asyncio
import dataclasses

from calstack.errors import OverloadedError

__all__ = ["Admission", "Place"]

_WEIGHT = 0.2  # of the newest measurement in the mean
_LONGEST_RETRY_S = 600.0


@dataclasses.dataclass(slots=True, eq=False)
class Place:
    """Room for one choice, from acceptance to its end."""

    tokens: int = 0
    waiting: bool = True
    released: bool = False


class Admission:
    """Counts choices in flight. Those beyond `lanes` wait; waiting is bounded.

    Args:
        lanes: choices the engine runs at once.
        max_requests: choices that may wait.
        max_tokens: prompt tokens that may wait; one choice alone may exceed it.
    """

    def __init__(self, *, lanes: int, max_requests: int, max_tokens: int) -> None:
        self.lanes, self.max_requests, self.max_tokens = lanes, max_requests, max_tokens
        self.in_flight = 0
        self.waiting_tokens = 0
        self.refused = 0
        self._service_s = 0.0  # mean time a choice holds a lane
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def waiting(self) -> int:
        """Choices beyond those that can run."""
        return max(0, self.in_flight - self.lanes)

    def reserve(self, count: int) -> list[Place]:
        """Room for `count` choices of one request.

        Raises:
            OverloadedError: when the queue is full; nothing is reserved then.
        """
        if self.in_flight + count > self.lanes + self.max_requests:
            self._refuse(f"the queue is full ({self.waiting} waiting, {self.max_requests} may)", count)
        self.in_flight += count
        self._idle.clear()
        return [Place() for _ in range(count)]

    def hold_tokens(self, places: list[Place], tokens: int) -> None:
        """Count the prompt tokens of each place.

        Raises:
            OverloadedError: when too many tokens wait already; the places stay reserved.
        """
        more = tokens * len(places)
        if self.waiting_tokens and self.waiting and self.waiting_tokens + more > self.max_tokens:
            self._refuse(f"the queue is full ({self.waiting_tokens} prompt tokens wait, {self.max_tokens} may)", len(places))
        for place in places:
            place.tokens = tokens
        self.waiting_tokens += more

    def started(self, place: Place) -> None:
        """The choice gave its first token."""
        if place.waiting:
            place.waiting = False
            self.waiting_tokens -= place.tokens

    def release(self, place: Place, service_s: float | None = None) -> None:
        """The choice has ended; `service_s` is how long it held a lane, where that is known."""
        if place.released:
            return
        self.started(place)
        place.released = True
        self.in_flight -= 1
        if not self.in_flight:
            self._idle.set()
        if service_s is not None:
            self._service_s += (service_s - self._service_s) * (_WEIGHT if self._service_s else 1.0)

    async def wait_idle(self) -> None:
        """Return when nothing is in flight."""
        await self._idle.wait()

    def retry_after(self, count: int = 1) -> float:
        """Seconds until the work that waits, and `count` more, will have found a lane, by measured times."""
        service = self._service_s or 1.0
        return min(_LONGEST_RETRY_S, max(1.0, (self.waiting + count) / max(1, self.lanes) * service))

    def _refuse(self, what: str, count: int) -> None:
        self.refused += count
        raise OverloadedError(what, retry_after=self.retry_after(count))
