"""A calbin driven straight on a device, without scheduler or engine: for benchmarks and quality measurements.

One caller, equal lanes: every lane gets the same number of positions, block ids are dealt out once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from calstack.calbin.manifest import Manifest, Submodel
from calstack.devices.base import Completion, Device, LaneInput, Launch, LogitRows, TokenFrom
from calstack.errors import DeviceError, UsageError
from calstack.specs import Role, SamplingParams

__all__ = ["DirectRunner"]

_GREEDY = SamplingParams(temperature=0.0)


class DirectRunner:
    """Prefills and decodes on a device in the simplest possible way.

    Args:
        device: an open device; the runner loads `calbin` on it and unloads it at `close`.
        manifest: the calbin's manifest.
        lanes: most lanes used at once.
        positions: most positions per lane.
    """

    def __init__(self, device: Device, calbin: Path, manifest: Manifest, *, lanes: int, positions: int, timeout_s: float = 600.0) -> None:
        self.device, self.manifest, self.timeout_s = device, manifest, timeout_s
        self._per_lane = -(-positions // manifest.kv.block_positions)
        self._handle = device.load(calbin, kv_blocks=lanes * self._per_lane)
        self._past = [0] * lanes

    def close(self) -> None:
        """Unload the calbin; the device stays open."""
        self.device.unload(self._handle)

    def past(self, lane: int = 0) -> int:
        """Positions in the lane's KV cache."""
        return self._past[lane]

    def rewind(self, lane: int, position: int = 0) -> None:
        """Forget everything from `position` on (not beyond what is there)."""
        self._past[lane] = min(position, self._past[lane])

    def prefill(
        self, ids: Sequence[int], *, lane: int = 0, chunk: int = 0, logits: LogitRows = LogitRows.NONE, profile: bool = False
    ) -> list[Completion]:
        """Append `ids` to a lane in launches of at most `chunk` tokens (0 = the largest there is); the last launch samples greedily."""
        submodel = self._largest(Role.PREFILL)
        size = min(chunk or submodel.q_len, submodel.q_len)
        tickets: list[int] = []
        done: list[Completion] = []
        for start in range(0, len(ids), size):
            part = ids[start : start + size]
            last = start + size >= len(ids)
            lane_input = LaneInput(
                past_len=self._past[lane],
                cur_len=len(part),
                blocks=self._blocks(lane),
                tokens=part,
                emit=last,
                sampling=_GREEDY,
                logits=logits,
            )
            if len(tickets) - len(done) >= 2:
                done.append(self._wait(tickets[len(done)]))
            tickets.append(self.device.submit(Launch(calbin=self._handle, submodel=submodel.key, lanes=(lane_input,), profile=profile)))
            self._past[lane] += len(part)
        done.extend(self._wait(t) for t in tickets[len(done) :])
        return done

    def decode(self, first: Sequence[int], steps: int, *, profile: bool = False) -> list[Completion]:
        """`steps` greedy decode launches over lanes 0..len(first)-1, starting from the ids `first`; two launches in flight,
        each taking its ids from the one before on the device."""
        submodel = self._decode_submodel(len(first))
        tickets: list[int] = []
        done: list[Completion] = []
        for step in range(steps):
            lanes = tuple(
                LaneInput(
                    past_len=self._past[i],
                    cur_len=1,
                    blocks=self._blocks(i),
                    tokens=TokenFrom(tickets[-1], i) if step else (first[i],),
                    emit=True,
                    sampling=_GREEDY,
                )
                for i in range(len(first))
            )
            if len(tickets) - len(done) >= 2:
                done.append(self._wait(tickets[len(done)]))
            tickets.append(self.device.submit(Launch(calbin=self._handle, submodel=submodel.key, lanes=lanes, profile=profile)))
            for i in range(len(first)):
                self._past[i] += 1
        done.extend(self._wait(t) for t in tickets[len(done) :])
        return done

    def _blocks(self, lane: int) -> range:
        return range(lane * self._per_lane, (lane + 1) * self._per_lane)

    def _wait(self, ticket: int) -> Completion:
        completion = self.device.wait(ticket, self.timeout_s)
        if completion is None:
            raise DeviceError(f"no completion within {self.timeout_s:.0f} s", where=self.device.info().name)
        if completion.error is not None:
            raise completion.error
        return completion

    def _largest(self, role: Role) -> Submodel:
        found = [s for s in self.manifest.submodels if s.role == role]
        if not found:
            raise UsageError(f"the calbin has no {role} submodel", remedy="compile it with one")
        return max(found, key=lambda s: (s.rows, s.context))

    def _decode_submodel(self, lanes: int) -> Submodel:
        found = [s for s in self.manifest.submodels if s.role == Role.DECODE and s.batch >= lanes]
        if not found:
            raise UsageError(f"the calbin has no decode submodel for {lanes} lanes", remedy=f"compile with --batch {lanes}")
        return min(found, key=lambda s: (s.batch, -s.context))
