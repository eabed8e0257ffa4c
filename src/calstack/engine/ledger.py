"""The step ledger (invariant 6): every instant of the engine's wall time gets one label.

By priority: infer > h2d > d2h > framework (work waits, the device is idle) > idle. The device's times come with each completion,
as intervals that end where the launch ended; the host's come from its own clock readings around turns and sleeps. Instants are
settled once no launch in flight can claim them any more.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from calstack.devices.base import Completion

__all__ = ["LABELS", "Ledger"]

LABELS = ("infer", "h2d", "d2h", "framework", "idle")
_TOGETHER = 64  # spans that are labelled at once
_RANK = {label: rank for rank, label in enumerate(LABELS)}


class _Span(NamedTuple):
    start: int
    end: int
    rank: int


class Ledger:
    """Sums of labelled time since `start_ns`."""

    def __init__(self, start_ns: int) -> None:
        self.start_ns = start_ns
        self._settled = self._horizon = start_ns
        self._open: list[_Span] = []
        self._sums = [0] * len(LABELS)
        self.padding_ns = 0  # share of infer spent on rows that served nobody

    def host(self, start_ns: int, end_ns: int, *, work: bool) -> None:
        """The host's clock read `start_ns`, then `end_ns`; between them requests were (not) waiting or running."""
        if end_ns <= start_ns:
            return
        rank = _RANK["framework" if work else "idle"]
        last = self._open[-1] if self._open else None
        if last is not None and last.rank == rank and last.end == start_ns:
            self._open[-1] = _Span(last.start, end_ns, rank)
        else:
            self._open.append(_Span(start_ns, end_ns, rank))

    def launch(self, completion: Completion, rows: int, useful_rows: int) -> None:
        """A launch ended: its three device intervals, and how many of its rows served a request."""
        end = completion.finished_ns
        for label, ns in (("d2h", completion.d2h_ns), ("infer", completion.infer_ns), ("h2d", completion.h2d_ns)):
            if ns > 0:
                self._open.insert(0, _Span(end - ns, end, _RANK[label]))
            end -= ns
        if rows > 0:
            self.padding_ns += completion.infer_ns * (rows - useful_rows) // rows

    def settle(self, horizon_ns: int) -> None:
        """Nothing before `horizon_ns` may be reported later: its instants get their labels, on demand or once there are many spans."""
        self._horizon = max(self._horizon, horizon_ns)
        if len(self._open) >= _TOGETHER:
            self._label()

    def _label(self) -> None:
        horizon_ns = self._horizon
        if horizon_ns <= self._settled:
            return
        spans = [_clip(s, self._settled, horizon_ns) for s in self._open]
        for rank, ns in _sweep(s for s in spans if s.end > s.start):
            self._sums[rank] += ns
        self._open = [s for s in self._open if s.end > horizon_ns]
        self._settled = horizon_ns

    def seconds(self) -> dict[str, float]:
        """Settled seconds per label."""
        self._label()
        return {label: ns / 1e9 for label, ns in zip(LABELS, self._sums, strict=True)}

    def nanoseconds(self, label: str) -> int:
        """Settled nanoseconds of a label."""
        self._label()
        return self._sums[_RANK[label]]

    @property
    def wall_ns(self) -> int:
        """Wall time that has been settled."""
        return self._horizon - self.start_ns


def _clip(span: _Span, low: int, high: int) -> _Span:
    return _Span(max(span.start, low), min(span.end, high), span.rank)


def _sweep(spans: Iterable[_Span]) -> Iterable[tuple[int, int]]:
    """(rank, ns) of each stretch between neighbouring borders, under the best rank open there."""
    borders = sorted(border for s in spans for border in ((s.start, s.rank, 1), (s.end, s.rank, -1)))
    counts = [0] * len(LABELS)
    before = borders[0][0] if borders else 0
    for at, rank, change in borders:
        if at > before:
            top = next((r for r, count in enumerate(counts) if count > 0), None)
            if top is not None:
                yield top, at - before
            before = at
        counts[rank] += change
