"""The flight recorder: a ring of the last launches, kept in memory; who dumps it decides where."""

from __future__ import annotations

import dataclasses
from collections import deque

from calstack.devices.base import Completion
from calstack.runtime.plan import LaunchPlan, with_host_token

__all__ = ["FlightRecorder", "LaunchRecord"]


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchRecord:
    """One attempt of a launch and how it ended."""

    plan: LaunchPlan
    attempt: int
    completion: Completion | None
    error: str = ""
    taken: tuple[int, ...] = ()  # per lane the id that it took from an earlier launch, -1 = none

    def resolved(self) -> LaunchRecord:
        """The record with these ids in the lanes."""
        lanes = tuple(lane if id_ < 0 else with_host_token(lane, id_) for lane, id_ in zip(self.plan.lanes, self.taken, strict=False))
        return self if not self.taken else dataclasses.replace(self, plan=dataclasses.replace(self.plan, lanes=lanes), taken=())


class FlightRecorder:
    """Keeps the last `size` records; older ones fall out."""

    def __init__(self, size: int = 64) -> None:
        self._ring: deque[LaunchRecord] = deque(maxlen=size)

    def add(self, record: LaunchRecord) -> None:
        """Append a record, without logits: they may be large, and a replay computes them anew."""
        done = record.completion
        if done is not None and any(lane.logits is not None for lane in done.lanes):
            lanes = tuple(dataclasses.replace(lane, logits=None) for lane in done.lanes)
            record = dataclasses.replace(record, completion=dataclasses.replace(done, lanes=lanes))
        self._ring.append(record)

    def records(self) -> tuple[LaunchRecord, ...]:
        """Oldest first."""
        return tuple(record.resolved() for record in self._ring)
