"""`calstack verify --full`: more cases made on the spot. The same ids must give the same bits by every way through a calbin.

Lengths lie around every edge: one below, at and above a prefill launch's tokens and a KV block, and three launches and a bit. Ways: every
submodel, alone and among other lanes, in blocks that held something else before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from calstack.quality.goldens import digest
from calstack.specs import Role

if TYPE_CHECKING:
    from calstack.calbin.manifest import Manifest, Submodel
    from calstack.progress import Progress
    from calstack.quality.feed import Feeder

__all__ = ["WayReport", "check_ways", "lengths", "longest"]

MOST_POSITIONS = 4096  # of a case: verify stays a matter of minutes


class WayReport(msgspec.Struct, frozen=True, kw_only=True):
    """One case: a length, and the ways whose bits differ from the first one's."""

    positions: int
    ways: int
    differ: tuple[str, ...]


def lengths(manifest: Manifest) -> tuple[int, ...]:
    """Prompt lengths that lie around the calbin's edges, within its context."""
    prefill = max((s for s in manifest.submodels if s.role is Role.PREFILL), key=lambda s: s.q_len)
    edges = {prefill.q_len, manifest.kv.block_positions, prefill.context}
    wanted = {edge + step for edge in edges for step in (-1, 0, 1)} | {3 * prefill.q_len + 5}
    return tuple(sorted(n for n in wanted if 2 <= n <= min(prefill.context, MOST_POSITIONS)))


def longest(manifest: Manifest) -> int:
    """Positions that the longest case needs."""
    return max(lengths(manifest))


def check_ways(feeder: Feeder, manifest: Manifest, progress: Progress) -> tuple[WayReport, ...]:
    """Run every case by every way."""
    rng = np.random.default_rng(1)
    found = []
    for n in lengths(manifest):
        ids = [int(i) for i in rng.integers(0, manifest.model.vocab, n)]
        lanes = max(s.batch for s in manifest.submodels)
        mates = [[int(i) for i in rng.integers(0, manifest.model.vocab, n)] for _ in range(lanes - 1)]
        digests = [(name, digest([rows])) for name, rows in _ways(feeder, manifest.submodels, ids, mates)]
        found.append(WayReport(positions=n, ways=len(digests), differ=tuple(name for name, bits in digests if bits != digests[0][1])))
        progress.advance()
    return tuple(found)


def _ways(
    feeder: Feeder, submodels: Sequence[Submodel], ids: list[int], mates: Sequence[list[int]]
) -> Iterator[tuple[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]]:
    """Logits of the last position by each way."""
    last = len(ids) - 1
    for submodel in submodels:
        yield f"{submodel.key}, alone", feeder.run(submodel, [ids], first=last)[0]
        if submodel.batch > 1:
            batch = [*mates[: submodel.batch - 1], ids]
            yield f"{submodel.key}, the last of {len(batch)} lanes, in used blocks", feeder.run(submodel, batch, first=last)[-1]
