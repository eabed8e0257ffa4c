"""Tickets of buffer writes: below zero, so that they never meet a launch's, and kept for a bounded number of writes."""

from __future__ import annotations

from calstack.devices.base import Completion, Ticket

__all__ = ["WriteTickets"]


class WriteTickets:
    """Completions of writes until they are claimed; beyond `most` the oldest is forgotten."""

    def __init__(self, most: int = 256) -> None:
        self._most, self._last = most, 0
        self._done: dict[Ticket, Completion] = {}

    def add(self, nbytes: int, start_ns: int, end_ns: int) -> Ticket:
        """The ticket of a write that has ended."""
        self._last -= 1
        if len(self._done) >= self._most:
            del self._done[next(iter(self._done))]
        self._done[self._last] = Completion(
            ticket=self._last,
            lanes=(),
            submitted_ns=start_ns,
            started_ns=start_ns,
            finished_ns=end_ns,
            h2d_ns=end_ns - start_ns,
            infer_ns=0,
            d2h_ns=0,
            h2d_bytes=nbytes,
            d2h_bytes=0,
        )
        return self._last

    def claim(self, ticket: Ticket) -> Completion | None:
        """The completion of a write, given once; None when it is not one of ours."""
        return self._done.pop(ticket, None)
