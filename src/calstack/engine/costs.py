"""What steps cost, measured while serving: for chunk sizes, Retry-After and the watchdog. Never for results."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import overload

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
        self._extend_ns: dict[int, float] = {}  # by rows
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

    def extend(self, rows: int, ns: int) -> None:
        """A launch that sampled after each of `rows` rows took `ns`, with the wait of the device before it."""
        self._extend_ns[rows] = _blend(self._extend_ns.get(rows), ns)

    @overload
    def extend_ns(self, rows: int) -> float | None: ...
    @overload
    def extend_ns(self, rows: int, otherwise: float) -> float: ...
    def extend_ns(self, rows: int, otherwise: float | None = None) -> float | None:
        """What an extend launch of `rows` rows should take: as the next smaller one that was measured, `otherwise` if none was."""
        measured = [n for n in self._extend_ns if n <= rows]
        return self._extend_ns[max(measured)] if measured else otherwise

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


def best_guesses(shares: Sequence[Callable[[int], float]], found: Sequence[int], costs: StepCosts, decode: str) -> list[int]:
    """How many guesses of each request to check in one launch: those that give the most ids a second.

    Args:
        shares: by request, ids that a launch with n of its guesses should give.
        found: guesses that each request has.
        costs: of launches; an extend that was never measured is taken for as cheap as a smaller one, and so gets measured.
        decode: the decode submodel that would take the requests without guesses.
    """
    counts = [0] * len(found)
    ids = sum(expected(0) for expected in shares)
    best, most = list(counts), 1.05 * ids / max(costs.decode_of(decode), 1.0)
    gains = [(-(shares[i](1) - shares[i](0)), i) for i, have in enumerate(found) if have]
    heapq.heapify(gains)
    rows = len(found)
    while gains:
        gain, i = heapq.heappop(gains)
        counts[i], ids, rows = counts[i] + 1, ids - gain, rows + 1
        if ids / max(costs.extend_ns(rows, costs.decode_of(decode)), 1.0) > most:
            best, most = list(counts), ids / max(costs.extend_ns(rows, costs.decode_of(decode)), 1.0)
        if counts[i] < found[i]:
            heapq.heappush(gains, (shares[i](counts[i]) - shares[i](counts[i] + 1), i))
    return best


def _blend(old: float | None, new: float) -> float:
    return new if old is None else _KEEP * old + (1 - _KEEP) * new
