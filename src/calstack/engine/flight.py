"""Launches in flight as the core keeps them: whose lanes they carry, and what is still of interest when they end."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from calstack.devices.base import Completion
from calstack.engine.costs import StepCosts
from calstack.engine.scores import scores
from calstack.engine.sequence import Phase, Sequence
from calstack.wire import LaunchTimes, TokenLogprob

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["Flight", "Kind", "LaneRef", "note_costs", "times_of"]

Kind = Literal["prefill", "decode", "extend"]


@dataclasses.dataclass(frozen=True, slots=True)
class LaneRef:
    """A lane of a launch in flight; stale once the request's epoch has moved on."""

    seq: Sequence
    epoch: int
    count: int
    end: int  # KV positions of the request after the launch
    emit: bool
    guesses: tuple[int, ...] = ()  # the last ids of the lane's input, when they are guessed

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
        if self.kind == "extend":
            return costs.extend_ns(self.rows)
        return costs.expected_ns(self.submodel, self.rows, prefill=self.kind == "prefill")


def times_of(flight: Flight, rows: int, useful: int, c: Completion, framework_ns: int) -> LaunchTimes:
    """A launch that ended well, for the histograms."""
    return LaunchTimes(
        phase="prefill" if flight.kind == "prefill" else "decode",
        submodel=flight.submodel,
        rows=rows,
        useful_rows=useful,
        infer_ms=c.infer_ns / 1e6,
        h2d_ms=c.h2d_ns / 1e6,
        d2h_ms=c.d2h_ns / 1e6,
        framework_ms=framework_ns / 1e6,
    )


def note_costs(
    flight: Flight, busy_ns: int, framework_ns: int, useful: int, costs: StepCosts, counters: Counter[str], running: Iterable[Sequence]
) -> None:
    """What a launch that ended well cost, and whom a prefill made wait: streams of others that had begun."""
    counters[f"{flight.kind}_rows"] += flight.rows
    counters["padding_rows"] += flight.rows - useful
    if flight.kind == "decode":
        costs.decode(flight.submodel, busy_ns)
        return
    if flight.kind == "extend":  # nothing runs ahead of it, so the host's time before the launch is a part of its price
        costs.extend(flight.rows, busy_ns + min(framework_ns, busy_ns))
        return
    costs.prefill(flight.rows, busy_ns)
    own = {lane.seq for lane in flight.lanes}
    if any(seq.first_token_ns and not seq.prefilling and seq not in own for seq in running):
        counters["prefill_interruptions"] += 1
        counters["prefill_interruption_ns"] += busy_ns
