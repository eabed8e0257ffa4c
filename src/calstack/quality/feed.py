"""Teacher-forced logits of a calbin on a device, through the device contract and nothing above it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from calstack.devices.base import Device, LaneInput, Launch, LogitRows
from calstack.errors import DeviceError

if TYPE_CHECKING:
    from types import TracebackType

    import numpy.typing as npt

    from calstack.calbin.manifest import Manifest, Submodel

    Floats = npt.NDArray[np.float32]

__all__ = ["Feeder"]

_TIMEOUT_S = 600.0


class Feeder:
    """A loaded calbin whose lanes are fed given ids.

    Args:
        device: an open device.
        calbin: its directory, sealed or staged.
        manifest: its manifest.
        lanes: most lanes fed at once.
        positions: most positions of a lane.
        probe: keep in `prints` what the device says its calls wrote, launch by launch.
    """

    def __init__(self, device: Device, calbin: Path, manifest: Manifest, *, lanes: int, positions: int, probe: bool = False) -> None:
        self._device, self._manifest, self._probe = device, manifest, probe
        self.prints: list[tuple[npt.NDArray[np.uint64], ...]] = []
        self._per_lane = -(-positions // manifest.kv.block_positions)
        self._handle = device.load(calbin, kv_blocks=lanes * self._per_lane)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._device.unload(self._handle)

    def run(self, submodel: Submodel, sequences: Sequence[Sequence[int]], *, first: int = 0) -> list[Floats]:
        """Logits [len - first, vocab] after positions `first`.. of each sequence: one per lane, from an empty past.

        Lanes advance together, as many tokens a launch as the submodel takes; a lane whose sequence has ended stays empty.
        """
        assert len(sequences) <= submodel.batch, "one lane per sequence"
        done = [0] * len(sequences)
        rows: list[list[Floats]] = [[] for _ in sequences]
        share = min(submodel.q_len, submodel.rows // len(sequences))
        while any(done[i] < len(sequence) for i, sequence in enumerate(sequences)):
            lanes: list[LaneInput] = []
            for lane, sequence in enumerate(sequences):
                lanes.append(self._lane(lane, sequence, done[lane], share, first))
            for lane, logits in enumerate(self._launch(submodel, lanes)):
                if logits is not None:
                    rows[lane].append(logits)
                done[lane] += lanes[lane].cur_len
        return [np.concatenate(parts) for parts in rows]

    def _lane(self, lane: int, sequence: Sequence[int], past: int, share: int, first: int) -> LaneInput:
        # A launch never straddles `first`, so that it wants all of its rows or none.
        end = min(past + share, len(sequence), first if past < first else len(sequence))
        used = -(-end // self._manifest.kv.block_positions)
        blocks = range(lane * self._per_lane, lane * self._per_lane + used)
        wanted = LogitRows.ALL if past >= first else LogitRows.NONE
        return LaneInput(past_len=past, cur_len=end - past, blocks=tuple(blocks), tokens=tuple(sequence[past:end]), logits=wanted)

    def _launch(self, submodel: Submodel, lanes: Sequence[LaneInput]) -> list[Floats | None]:
        used = [lane for lane in lanes if lane.cur_len]
        ticket = self._device.submit(Launch(calbin=self._handle, submodel=submodel.key, lanes=tuple(used), probe=self._probe))
        completion = self._device.wait(ticket, _TIMEOUT_S)
        if completion is None:
            raise DeviceError(f"gave no answer in {_TIMEOUT_S:.0f} s", where=submodel.key, remedy="see the device's log")
        if completion.error is not None:
            raise completion.error
        if self._probe:
            self.prints.append(completion.prints)
        outputs = iter(completion.lanes)
        answers = [next(outputs) if lane.cur_len else None for lane in lanes]
        return [
            None if answer is None or lane.logits is LogitRows.NONE else answer.logits for answer, lane in zip(answers, lanes, strict=True)
        ]
