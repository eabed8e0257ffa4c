"""Launches in flight as the core keeps them: whose lanes they carry, and what is still of interest when they end."""

from __future__ import annotations

import dataclasses
from typing import Literal

from calstack.devices.base import Completion
from calstack.engine.costs import StepCosts
from calstack.engine.sequence import Phase, Sequence
from calstack.wire import LaunchTimes

__all__ = ["Flight", "Kind", "LaneRef", "times_of"]

Kind = Literal["prefill", "decode"]


@dataclasses.dataclass(frozen=True, slots=True)
class LaneRef:
    """A lane of a launch in flight; stale once the request's epoch has moved on."""

    seq: Sequence
    epoch: int
    count: int
    end: int  # KV positions of the request after the launch
    emit: bool

    @property
    def live(self) -> bool:
        """True while the request waits for this lane's end."""
        return self.seq.epoch == self.epoch and self.seq.phase is Phase.RUNNING


@dataclasses.dataclass(frozen=True, slots=True)
class Flight:
    """A planned launch that has not ended."""

    kind: Kind
    submodel: str
    lanes: tuple[LaneRef, ...]

    @property
    def rows(self) -> int:
        """Rows that the launch computes."""
        return sum(lane.count for lane in self.lanes)

    def expected_ns(self, costs: StepCosts) -> float | None:
        """What the launch should take, or None when nobody knows yet."""
        return costs.expected_ns(self.submodel, self.rows, prefill=self.kind == "prefill")


def times_of(flight: Flight, rows: int, useful: int, c: Completion, framework_ns: int) -> LaunchTimes:
    """A launch that ended well, for the histograms."""
    return LaunchTimes(
        phase=flight.kind,
        submodel=flight.submodel,
        rows=rows,
        useful_rows=useful,
        infer_ms=c.infer_ns / 1e6,
        h2d_ms=c.h2d_ns / 1e6,
        d2h_ms=c.d2h_ns / 1e6,
        framework_ms=framework_ns / 1e6,
    )
