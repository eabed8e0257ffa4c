"""The flight recorder on disk: the last launches with everything needed to run each of them again, one JSON document.

A lane carries the ids of its whole context, so a launch can be repeated although the KV contents are gone. A dump therefore holds what
users wrote: it is readable by its owner alone, and a directory keeps no more bytes of dumps than its quota.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np

from calstack.devices.base import LaneInput, LaneOutput, RowOutput, TokenFrom
from calstack.errors import SourceError
from calstack.runtime.recorder import LaunchRecord
from calstack.specs import DrawKey, SamplingParams

__all__ = ["Dump", "DumpDirectory", "DumpedLane", "DumpedLaunch", "DumpedRow", "dumped", "read_dump"]

_MOST_BYTES = 1 << 30


class DumpedRow(msgspec.Struct, frozen=True, kw_only=True):
    """What came out after a sampled row before the lane's last."""

    token: int
    logprob: float | None
    top_ids: list[int]
    top_logprob_values: list[float]


class DumpedLane(msgspec.Struct, frozen=True, kw_only=True):
    """One lane: inputs as `LaneInput` has them, the ids before them, and what came out (token -1: nothing was asked for)."""

    context: list[int] | None  # ids at positions [0, past_len); None when they are not known any more
    past_len: int
    blocks: list[int]
    tokens: list[int]
    emit: bool
    sampling: SamplingParams | None
    draw: DrawKey | None
    prompt_history: list[int]
    output_history: list[int]
    mask: bytes | None
    top_logprobs: int
    token: int
    logprob: float | None
    top_ids: list[int]
    top_logprob_values: list[float]
    emit_rows: int = 1
    before: list[DumpedRow] = []


class DumpedLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt of a launch; `error` is set and its lanes' outputs are empty when it failed."""

    plan: int
    attempt: int
    submodel: str
    lanes: list[DumpedLane]
    error: str = ""
    infer_ns: int = 0
    finished_ns: int = 0


class Dump(msgspec.Struct, frozen=True, kw_only=True):
    """What a dump file holds."""

    format: int = 1
    calbin: str  # where it was loaded from
    device: str
    reason: str
    launches: list[DumpedLaunch]


def dumped(records: Iterable[LaunchRecord], *, calbin: str, device: str, reason: str) -> bytes:
    """Records as a dump file's bytes."""
    return msgspec.json.encode(Dump(calbin=calbin, device=device, reason=reason, launches=[_launch(r) for r in records]))


def read_dump(path: Path) -> Dump:
    """A dump file. Raises SourceError when it is not one."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise SourceError("is too large for a dump", where=str(path))
        dump = msgspec.json.decode(path.read_bytes(), type=Dump)
    except (OSError, msgspec.MsgspecError) as error:
        raise SourceError(f"is no dump of launches: {error}", where=str(path), remedy="give a file that the engine wrote") from error
    if dump.format != 1:
        raise SourceError(f"dump format {dump.format} is not read here", where=str(path), remedy="use the calstack that wrote it")
    return dump


class DumpDirectory:
    """Where dumps go: at most `quota` bytes of them, the oldest removed first; failures to write are ignored."""

    def __init__(self, path: Path, quota: int = 64 << 20) -> None:
        self.path, self.quota = path, quota
        self._count = 0

    def write(self, data: bytes) -> Path | None:
        """A new file, or None when it does not fit or cannot be written."""
        if len(data) > self.quota:
            return None
        self._count += 1
        target = self.path / f"launches-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}-{self._count}.json"
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._make_room(len(data))
            with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(data)
        except OSError:
            return None
        return target

    def _make_room(self, wanted: int) -> None:
        files = sorted(self.path.glob("launches-*.json"), key=lambda p: p.stat().st_mtime_ns)
        total = sum(p.stat().st_size for p in files)
        for file in files:
            if total + wanted <= self.quota:
                return
            total -= file.stat().st_size
            with contextlib.suppress(FileNotFoundError):
                file.unlink()


def _launch(record: LaunchRecord) -> DumpedLaunch:
    done = record.completion
    outputs = done.lanes if done is not None else ()
    known = record.plan.known or (((), ()),) * len(record.plan.lanes)
    return DumpedLaunch(
        plan=record.plan.id,
        attempt=record.attempt,
        submodel=record.plan.submodel,
        lanes=[_lane(lane, known[i], outputs[i] if i < len(outputs) else None) for i, lane in enumerate(record.plan.lanes)],
        error=record.error,
        infer_ns=done.infer_ns if done is not None else 0,
        finished_ns=done.finished_ns if done is not None else 0,
    )


def _lane(lane: LaneInput, known: tuple[Iterable[int], Iterable[int]], out: LaneOutput | None) -> DumpedLane:
    ids = [*known[0], *known[1]][: lane.past_len]
    resolved = not isinstance(lane.tokens, TokenFrom)
    return DumpedLane(
        context=ids if len(ids) == lane.past_len and resolved else None,
        past_len=lane.past_len,
        blocks=list(lane.blocks),
        tokens=[] if isinstance(lane.tokens, TokenFrom) else list(lane.tokens),
        emit=lane.emit,
        sampling=lane.sampling,
        draw=lane.draw,
        prompt_history=list(lane.prompt_history),
        output_history=list(lane.output_history),
        mask=None if lane.mask is None else np.ascontiguousarray(lane.mask).tobytes(),
        top_logprobs=lane.top_logprobs,
        token=out.token if out is not None else -1,
        logprob=out.logprob if out is not None and lane.top_logprobs >= 0 else None,
        top_ids=list(out.top_ids) if out is not None else [],
        top_logprob_values=list(out.top_logprobs) if out is not None else [],
        emit_rows=lane.emit_rows,
        before=[_row(row, scored=lane.top_logprobs >= 0) for row in out.before] if out is not None else [],
    )


def _row(row: RowOutput, *, scored: bool) -> DumpedRow:
    values = list(row.top_logprobs)
    return DumpedRow(token=row.token, logprob=row.logprob if scored else None, top_ids=list(row.top_ids), top_logprob_values=values)
