"""Runs the points of a benchmark: subjects take turns, repeat by repeat, so that a drifting machine hurts both alike."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Protocol

from msgspec.structs import replace

from calstack.bench.report import Row, Samples
from calstack.bench.subject import Subject

__all__ = ["Point", "measure", "points"]

DECODE_STEPS = 64
SETTLE_S = 0.1  # before every run: worker threads of the subject before may spin on for a while after their work


class Roof(Protocol):
    """What `measure` needs of a roofline."""

    def measure(self, point: Point) -> None:
        """Measure the ceilings once more."""
        ...

    def share(self, point: Point, seconds: Sequence[float]) -> float:
        """Share of the limit that rounds of so many seconds reached."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """One thing to measure."""

    phase: str  # prefill | decode | batch
    prompt: int
    depth: int
    batch: int

    @property
    def tokens(self) -> int:
        """Tokens a run produces or consumes."""
        return self.prompt if self.phase == "prefill" else DECODE_STEPS * self.batch

    @property
    def positions(self) -> int:
        """Cache positions a run needs per sequence."""
        return max(self.prompt, self.depth + DECODE_STEPS) + 1

    def run(self, subject: Subject) -> float:
        """Seconds of one run."""
        if self.phase == "prefill":
            return subject.prefill(self.prompt)
        return subject.decode(self.depth, self.batch, DECODE_STEPS)


def points(prompts: Sequence[int], depths: Sequence[int], batches: Sequence[int]) -> list[Point]:
    """Prefill of every prompt, decode at every depth, batches over 1 at the first depth only."""
    found = [Point("prefill", n, 0, 1) for n in prompts]
    if 1 in batches:
        found += [Point("decode", 0, depth, 1) for depth in depths]
    if depths:
        found += [Point("batch", 0, depths[0], batch) for batch in batches if batch > 1]
    return found


def measure(
    point: Point,
    ours: Sequence[tuple[str, Subject]],
    peers: Sequence[tuple[str, Subject]],
    *,
    repeats: int,
    kv_dtype: str,
    roof: Roof | None = None,
) -> list[Row]:
    """Rows of one point: ours through every way named, against every peer (without a peer when there is none).

    One uncounted round, then `repeats` rounds in which all subjects take turns; the ceilings are measured around each.
    """
    subjects = [subject for _, subject in (*ours, *peers)]
    seconds: list[list[float]] = [[] for _ in subjects]
    for round_ in range(repeats + 1):
        if roof is not None and round_:
            roof.measure(point)
        for times, subject in zip(seconds, subjects, strict=True):
            time.sleep(SETTLE_S)
            elapsed = point.run(subject)
            if round_:
                times.append(elapsed)
    samples = [Samples(times, point.tokens) for times in seconds]
    own = [_row(point, through, sample, kv_dtype) for (through, _), sample in zip(ours, samples, strict=False)]
    if roof is not None:
        roof.measure(point)
        own = [replace(row, share_of_limit=roof.share(point, times)) for row, times in zip(own, seconds, strict=False)]
    others = [(name, sample) for (name, _), sample in zip(peers, samples[len(ours) :], strict=True)]
    return own if not others else [_against(row, name, sample) for row in own for name, sample in others]


def _row(point: Point, through: str, sample: Samples, kv_dtype: str) -> Row:
    return Row(
        phase=point.phase,
        through=through,
        prompt=point.prompt,
        depth=point.depth,
        batch=point.batch,
        tok_s=sample.median,
        spread=sample.spread,
        ttft_ms=1e3 * point.prompt / sample.median if point.phase == "prefill" else None,
        kv_dtype=kv_dtype,
    )


def _against(row: Row, peer: str, sample: Samples) -> Row:
    return replace(row, peer=peer, peer_tok_s=sample.median, peer_spread=sample.spread, ratio=row.tok_s / sample.median)
