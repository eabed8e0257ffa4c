"""Where activation buffers lie: a region is shared by buffers whose lifetimes do not meet."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from calstack.calbin.check import ALIGN
from calstack.calbin.packing import padded_rows
from calstack.calbin.program import Buffer, Call, EncoderAttention
from calstack.specs import DType

__all__ = ["Life", "buffers_of", "lifetimes", "plan_buffers"]


@dataclasses.dataclass(frozen=True, slots=True)
class Life:
    """First and last call (both included) that touch a buffer."""

    first: int
    last: int

    def meets(self, other: Life) -> bool:
        """Whether both are alive during some call."""
        return self.first <= other.last and other.first <= self.last


def buffers_of(call: Call) -> tuple[str, ...]:
    """Names of the buffers a call reads or writes."""
    names = (getattr(call, field, None) for field in ("x", "qkv", "kv", "table", "choice", "residual", "out"))
    return tuple(name for name in names if name is not None)


def lifetimes(calls: Sequence[Call]) -> dict[str, Life]:
    """Lifetimes in order of first use."""
    lives: dict[str, Life] = {}
    for index, call in enumerate(calls):
        for name in buffers_of(call):
            lives[name] = Life(lives[name].first if name in lives else index, index)
    return lives


def plan_buffers(
    calls: Sequence[Call], widths: Mapping[str, int], rows: int, *, chip: int = 0, lanes: int = 1
) -> tuple[tuple[Buffer, ...], int]:
    """Placed buffers in order of first use, and the arena's size in bytes. Largest first, each at the lowest offset that is free."""
    lives = lifetimes(calls)
    tall = {call.kv for call in calls if isinstance(call, EncoderAttention)}
    height = {name: padded_rows(rows, lanes) if name in tall else rows for name in lives}
    size = {name: 4 * widths[name] * height[name] for name in lives}
    offsets: dict[str, int] = {}
    for name in sorted(lives, key=lambda n: (-size[n], lives[n].first)):
        taken = [(offsets[other], offsets[other] + size[other]) for other in offsets if lives[other].meets(lives[name])]
        offsets[name] = _lowest_gap(sorted(taken), size[name])
    arena = _aligned(max(offsets[name] + size[name] for name in lives))
    return tuple(_buffer(name, widths[name], height[name], chip, offsets[name]) for name in lives), arena


def _buffer(name: str, width: int, rows: int, chip: int, offset: int) -> Buffer:
    return Buffer(name=name, dtype=DType.F32, width=width, rows=rows, chip=chip, offset=offset)


def _aligned(value: int) -> int:
    return -(-value // ALIGN) * ALIGN


def _lowest_gap(taken: Iterable[tuple[int, int]], size: int) -> int:
    at = 0
    for start, end in taken:
        if at + size <= start:
            break
        at = max(at, _aligned(end))
    return at
