"""What steps cost, measured while serving: for chunk sizes, Retry-After and the watchdog. Never for results."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence

__all__ = ["StepCosts", "Work", "best_guesses", "wait_estimate_s"]

_KEEP = 0.8  # weight of the past in a moving average
_FIRST_GUESS_NS = 20e6  # a decode step before any was measured
_FIRST_ROW_NS = 0.5e6

Work = tuple[int, int]  # (prompt tokens to compute, output tokens expected)


class StepCosts:
    """Moving averages of device time: per prefill row, per decode launch of each submodel, and of output lengths."""

    def __init__(self) -> None:
        self._row_ns: float | None = None
        self._decode_ns: dict[str, float] = {}
        self._last_decode = ""
        self._share = 1.0  # output tokens made / output tokens allowed

    def prefill(self, rows: int, ns: int) -> None:
        """A prefill launch of `rows` rows took `ns`."""
        if rows > 0:
            self._row_ns = _blend(self._row_ns, ns / rows)

    def decode(self, submodel: str, ns: int) -> None:
        """A decode launch took `ns`."""
        self._decode_ns[submodel] = _blend(self._decode_ns.get(submodel), ns)
        self._last_decode = submodel

    def ended(self, made: int, allowed: int) -> None:
        """A request ended by itself with `made` of `allowed` output tokens."""
        if allowed > 0:
            self._share = _blend(self._share, min(made / allowed, 1.0))

    @property
    def row_ns(self) -> float:
        """Prefill time per row."""
        return self._row_ns if self._row_ns is not None else _FIRST_ROW_NS

    @property
    def decode_ns(self) -> float:
        """Time of a decode launch like the last one."""
        return self._decode_ns.get(self._last_decode, _FIRST_GUESS_NS)

    @property
    def output_share(self) -> float:
        """Share of its allowed output that a request makes, on average."""
        return self._share

    def expected_ns(self, submodel: str, rows: int, *, prefill: bool) -> float | None:
        """What a launch should take, or None before one like it was measured."""
        if prefill:
            return None if self._row_ns is None else rows * self._row_ns
        return self._decode_ns.get(submodel)

    def decode_of(self, submodel: str, otherwise: float = _FIRST_GUESS_NS) -> float:
        """Time of a decode launch of a submodel, `otherwise` where none was measured."""
        return self._decode_ns.get(submodel, otherwise)

    def rows_within(self, target_ns: float, least: int) -> int:
        """Prefill rows that fit beside one decode step in `target_ns`, at least `least`."""
        if self._row_ns is None or not self._decode_ns:
            return least if self._decode_ns else 1 << 30
        return max(least, int((target_ns - self.decode_ns) / max(self._row_ns, 1.0)))  # a simulated device may take no time


def wait_estimate_s(costs: StepCosts, lanes: int, running: Iterable[Work], queued: Sequence[Work]) -> float:
    """Seconds until a request that joins the queue's tail now would start: each lane works its list off, prefill slows all."""
    step = costs.decode_ns
    ends = [work[0] * costs.row_ns + work[1] * step for work in running]
    ends = heapq.nsmallest(lanes, ends) + [0.0] * max(lanes - len(ends), 0)
    heapq.heapify(ends)
    prefill = 0.0
    for rows, tokens in queued:
        begin = heapq.heappop(ends)
        prefill += rows * costs.row_ns
        heapq.heappush(ends, begin + tokens * step)
    return (ends[0] + prefill) / 1e9


def best_guesses(
    shares: Sequence[Callable[[int], float]], found: Sequence[int], buckets: Sequence[tuple[str, int]], costs: StepCosts
) -> list[int]:
    """How many guesses of each request to check in one launch.

    Args:
        shares: by request, ids that a launch with n of its guesses should give.
        found: guesses that each request has.
        buckets: submodel and lanes of the decode launches there are, smallest first.
        costs: of launches; one that was never measured is taken for as cheap as the smallest, and so gets measured.

    Returns:
        Guesses by request: those that give the most ids a second.
    """
    base = min((costs.decode_of(name) for name, _ in buckets), default=_FIRST_GUESS_NS)
    best, most = [0] * len(found), 0.0
    for name, lanes in buckets:
        if lanes < len(found):
            continue
        counts = _spread(found, lanes - len(found))
        rate = sum(expected(n) for expected, n in zip(shares, counts, strict=True)) / max(costs.decode_of(name, base), 1.0)
        if rate > 1.05 * most:
            best, most = counts, rate
    return best


def _spread(found: Sequence[int], room: int) -> list[int]:
    """At most `room` of them, taken in turn."""
    counts = [0] * len(found)
    while room > 0 and any(n < have for n, have in zip(counts, found, strict=True)):
        for i, have in enumerate(found):
            if counts[i] < have and room > 0:
                counts[i] += 1
                room -= 1
    return counts


def _blend(old: float | None, new: float) -> float:
    return new if old is None else _KEEP * old + (1 - _KEEP) * new
