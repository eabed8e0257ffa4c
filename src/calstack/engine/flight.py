"""Launches in flight as the core keeps them: whose lanes they carry, and what is still of interest when they end."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

from calstack.devices.base import Completion
from calstack.engine.costs import StepCosts
from calstack.engine.scores import scores
from calstack.engine.sequence import Phase, Sequence
from calstack.wire import LaunchTimes, TokenLogprob

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

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

    def scores(self, logits: npt.NDArray[np.float32]) -> tuple[int, tuple[TokenLogprob, ...]]:
        """The first prompt position that the lane's rows predict, and the scores from there on."""
        start = self.end - self.count
        return start + 1, scores(logits, self.seq.targets(start, self.end), self.seq.submit.prompt_logprobs)


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
