"""What the machine would allow: bytes over read bandwidth, or operations over the int8 peak, whichever takes longer.

The work is the submodel's own workload from the manifest. Ceilings are measured between the rounds of every point, for a machine that
shares its memory with others changes from second to second: a round's limit is what was measured just before it and just after.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from calstack import api
from calstack.bench.runner import DECODE_STEPS, Point
from calstack.calbin.manifest import Manifest, Submodel
from calstack.errors import UsageError
from calstack.specs import Role

if TYPE_CHECKING:
    from calstack.api import Ceilings

__all__ = ["Roofline"]


class Roofline:
    """Ceilings of this machine, and the seconds they allow for a point.

    Args:
        manifest: of the calbin measured.
        isa, threads: whose ceilings.
    """

    def __init__(self, manifest: Manifest, *, isa: str, threads: int) -> None:
        self._manifest, self._isa, self._threads = manifest, isa, threads
        self._found: dict[Point, list[Ceilings]] = {}

    @property
    def read_gb_s(self) -> float:
        """Median of everything measured."""
        return statistics.median(c.read_gb_s for found in self._found.values() for c in found)

    @property
    def int8_gop_s(self) -> float:
        """Median of everything measured."""
        return statistics.median(c.int8_gop_s for found in self._found.values() for c in found)

    def measure(self, point: Point) -> None:
        """Measure both ceilings once more, over a buffer as large as what one decode step of the point reads."""
        found = api.ceilings(isa=self._isa, threads=self._threads, nbytes=int(self._bytes(point) / self._passes(point)))
        self._found.setdefault(point, []).append(found)

    def share(self, point: Point, seconds: Sequence[float]) -> float:
        """Median over the rounds of the share of its limit that each round reached.

        Args:
            point: measured before its first round and behind every one.
            seconds: of the rounds, in order.

        Raises:
            UsageError: above 1, for then a ceiling was measured too low.
        """
        found = self._found[point]
        shares = [self._limit_s(point, around) / s for around, s in zip(itertools.pairwise(found), seconds, strict=True)]
        share = statistics.median(shares)
        if share > 1:
            raise UsageError(
                f"{point.phase} at {share:.0%} of the limit: the ceilings were measured too low",
                where=f"{self.read_gb_s:.1f} GB/s, {self.int8_gop_s:.0f} GOP/s",
                remedy="run again on a quiet machine",
            )
        return share

    def _limit_s(self, point: Point, around: Sequence[Ceilings]) -> float:
        read, int8 = statistics.mean(c.read_gb_s for c in around), statistics.mean(c.int8_gop_s for c in around)
        return max(self._bytes(point) / (1e9 * read), 2 * self._work(point, "macs") / (1e9 * int8))

    def _bytes(self, point: Point) -> float:
        return self._work(point, "bytes")

    def _passes(self, point: Point) -> int:
        """Launches of the point: each reads the weights once."""
        return -(-point.prompt // self._submodel(point).q_len) if point.phase == "prefill" else DECODE_STEPS

    def _work(self, point: Point, unit: str) -> float:
        load = next(w for w in self._submodel(point).workload if w.unit == unit)
        past = point.prompt * (point.prompt - 1) / 2
        if point.phase != "prefill":
            past = point.batch * sum(point.depth + step for step in range(DECODE_STEPS))
        elif unit == "bytes":
            # a launch's rows share each read of the cache
            q = self._submodel(point).q_len
            past = float(sum(min(start + q, point.prompt) for start in range(0, point.prompt, q)))
        experts = load.per_expert * self._distinct(point) * self._passes(point)
        return load.constant * self._passes(point) + load.per_token * point.tokens + load.per_past_token * past + experts

    def _distinct(self, point: Point) -> float:
        """Experts of a layer that a launch touches, when every token chooses independently of the others."""
        moe = self._manifest.model.moe
        if moe is None:
            return 0.0
        rows = point.batch if point.phase != "prefill" else min(point.prompt, self._submodel(point).q_len)
        return float(moe.experts * (1.0 - (1.0 - moe.top_k / moe.experts) ** rows))

    def _submodel(self, point: Point) -> Submodel:
        role = Role.PREFILL if point.phase == "prefill" else Role.DECODE
        return _smallest([s for s in self._manifest.submodels if s.role == role and s.batch >= point.batch])


def _smallest(submodels: Sequence[Submodel]) -> Submodel:
    return min(submodels, key=lambda s: s.batch)
