"""The flight recorder: a ring of the last launches, kept in memory; who dumps it decides where."""

from __future__ import annotations

import dataclasses
from collections import deque

from calstack.devices.base import Completion
from calstack.runtime.plan import LaunchPlan

__all__ = ["FlightRecorder", "LaunchRecord"]


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchRecord:
    """One attempt of a launch and how it ended."""

    plan: LaunchPlan
    attempt: int
    completion: Completion | None
    error: str = ""


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
        return tuple(self._ring)
