"""Log-probabilities of known ids, from a launch's logits: what an echoed prompt is scored with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from calstack.wire import TokenLogprob

__all__ = ["scores"]


def scores(logits: npt.NDArray[np.float32], ids: Sequence[int], top: int) -> tuple[TokenLogprob, ...]:
    """One entry per id: row i of `logits` `[rows, vocab]` (f32, raw) predicts `ids[i]`; with the `top` likeliest ids, the lowest id
    first where they tie. log p(x) = x - max - log sum exp(x - max), the sum in f64."""
    out = []
    for row, id_ in zip(logits, ids, strict=False):
        highest = float(row.max())
        base = highest + float(np.log(np.exp(row - highest).sum(dtype=np.float64)))
        best = _best(row, top)
        values = tuple(float(row[other]) - base for other in best)
        out.append(TokenLogprob(logprob=float(row[id_]) - base, top_ids=best, top_logprobs=values))
    return tuple(out)


def _best(row: npt.NDArray[np.float32], top: int) -> tuple[int, ...]:
    if top < 1:
        return ()
    least = np.partition(row, row.size - top)[row.size - top] if top < row.size else row.min()
    found = np.flatnonzero(row >= least)
    order = np.argsort(-row[found], kind="stable")[:top]
    return tuple(int(id_) for id_ in found[order])
