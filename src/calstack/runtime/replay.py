"""Runs the launches of a dump again, on any device that loads the calbin, and compares what comes out bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from calstack.calbin.reader import open_calbin
from calstack.devices.base import Completion, Device, LaneInput, LaneOutput, Launch, RowOutput
from calstack.errors import DeviceError, SourceError
from calstack.runtime.dump import Dump, DumpedLane, DumpedLaunch, DumpedRow
from calstack.runtime.facts import CalbinFacts, Extent
from calstack.specs import Role

__all__ = ["Replay", "Replayed"]

_TIMEOUT_S = 600.0


@dataclasses.dataclass(frozen=True, slots=True)
class Replayed:
    """What became of one launch of a dump."""

    launch: DumpedLaunch
    compared: int  # lanes whose outputs were compared
    skipped: int  # lanes whose context the dump does not hold
    differences: tuple[str, ...]


class Replay:
    """A dump on a device. Every lane's context is computed first, where it does not stand in its blocks already."""

    def __init__(self, dump: Dump, device: Device, calbin: Path) -> None:
        """Load the calbin. Raises ArtifactError when it does not fit, SourceError when the dump is not this calbin's."""
        self._dump, self._device = dump, device
        self._facts = CalbinFacts.from_manifest(open_calbin(calbin).manifest)
        keys = {sub.key for sub in self._facts.submodels}
        for launch in dump.launches:
            if launch.submodel not in keys:
                raise SourceError(f"the calbin has no submodel {launch.submodel}", where=str(calbin), remedy="name the calbin of the dump")
        most = max((block for launch in dump.launches for lane in launch.lanes for block in lane.blocks), default=0)
        self._handle = device.load(calbin, kv_blocks=most + 1)
        self._held: dict[int, list[int]] = {}  # block -> all ids up to its last written position

    def run(self) -> Iterator[Replayed]:
        """The dump's launches in order; failed attempts are left out."""
        for launch in self._dump.launches:
            if not launch.error:
                yield self._one(launch)

    def close(self) -> None:
        """Unload the calbin."""
        self._device.unload(self._handle)

    def _one(self, launch: DumpedLaunch) -> Replayed:
        lanes = [lane for lane in launch.lanes if lane.context is not None]
        for lane in lanes:
            self._restore(lane)
        done = self._run(launch.submodel, [_input(lane, self._facts.vocab) for lane in lanes]) if lanes else None
        differences: list[str] = []
        for index, lane in enumerate(lanes):
            self._note(lane.blocks, [*(lane.context or ()), *lane.tokens])
            if done is not None:
                differences += [f"lane {index}: {text}" for text in _differences(lane, done.lanes[index])]
        return Replayed(launch, len(lanes), len(launch.lanes) - len(lanes), tuple(differences))

    def _restore(self, lane: DumpedLane) -> None:
        ids = lane.context or []
        at = self._standing(lane.blocks, ids)
        largest = max(self._facts.of_role(Role.PREFILL), key=lambda sub: (sub.context, sub.rows))
        size = min(largest.q_len, largest.rows, self._facts.max_tokens_per_launch)
        while at < len(ids):
            part = ids[at : at + size]
            sub = next(s for s in self._facts.of_role(Role.PREFILL) if s.fits([Extent(at, len(part))]))
            self._run(sub.key, [LaneInput(past_len=at, cur_len=len(part), blocks=lane.blocks, tokens=part)])
            at += len(part)
        self._note(lane.blocks, ids)

    def _standing(self, blocks: list[int], ids: list[int]) -> int:
        """How many of `ids` stand in the blocks already."""
        size = self._facts.block_positions
        for i, block in enumerate(blocks):
            end = min((i + 1) * size, len(ids))
            if i * size >= end or self._held.get(block, [])[:end] != ids[:end]:
                return min(i * size, len(ids))
        return len(ids)

    def _note(self, blocks: list[int], ids: list[int]) -> None:
        size = self._facts.block_positions
        for i, block in enumerate(blocks[: -(-len(ids) // size)]):
            self._held[block] = ids[: (i + 1) * size]

    def _run(self, submodel: str, lanes: list[LaneInput]) -> Completion:
        ticket = self._device.submit(Launch(calbin=self._handle, submodel=submodel, lanes=tuple(lanes)))
        done = self._device.wait(ticket, _TIMEOUT_S)
        if done is None:
            raise DeviceError(f"a launch did not end within {_TIMEOUT_S:.0f} s", where=submodel)
        if done.error is not None:
            raise done.error
        return done


def _input(lane: DumpedLane, vocab: int) -> LaneInput:
    mask = None if lane.mask is None else np.frombuffer(lane.mask, np.int32)
    if mask is not None and mask.size != lane.emit_rows * -(-vocab // 32):
        raise SourceError("a mask of the dump does not fit the calbin's vocabulary", where="dump")
    return LaneInput(
        past_len=lane.past_len,
        cur_len=len(lane.tokens),
        blocks=lane.blocks,
        tokens=lane.tokens,
        emit=lane.emit,
        sampling=lane.sampling,
        draw=lane.draw,
        prompt_history=lane.prompt_history,
        output_history=lane.output_history,
        mask=mask if mask is None or lane.emit_rows == 1 else mask.reshape(lane.emit_rows, -1),
        top_logprobs=lane.top_logprobs,
        emit_rows=lane.emit_rows,
    )


def _differences(lane: DumpedLane, out: LaneOutput) -> Iterator[str]:
    if len(out.before) != len(lane.before):
        yield f"{len(out.before) + 1} sampled rows, recorded {len(lane.before) + 1}"
    for step, (was, now) in enumerate(zip(lane.before, out.before, strict=False)):
        yield from (f"row {step}: {text}" for text in _row_differences(was, now))
    yield from _row_differences(lane, out)


def _row_differences(lane: DumpedLane | DumpedRow, out: LaneOutput | RowOutput) -> Iterator[str]:
    if out.token != lane.token:
        yield f"token {out.token}, recorded {lane.token}"
    if lane.logprob is not None and out.logprob != lane.logprob:
        yield f"log-probability {out.logprob!r}, recorded {lane.logprob!r}"
    if (list(out.top_ids), list(out.top_logprobs)) != (lane.top_ids, lane.top_logprob_values):
        yield "other top log-probabilities"
