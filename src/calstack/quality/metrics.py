"""Perplexity, KL divergence and top-1 agreement from logits, in f64."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats32 = npt.NDArray[np.float32]
    Floats64 = npt.NDArray[np.float64]
    Ints = npt.NDArray[np.int64]

__all__ = ["RowScores", "kl_of_top", "log_sum_exp", "score_rows"]

_ROWS = 64  # scored at once: bounds the f64 temporaries


@dataclasses.dataclass(frozen=True, slots=True)
class RowScores:
    """Per row: negative log-likelihood of the next token under both models, KL(reference || model), same most likely token."""

    nll: Floats64
    reference_nll: Floats64
    kl: Floats64
    agree: npt.NDArray[np.bool_]


def log_sum_exp(logits: npt.NDArray[np.floating]) -> Floats64:
    """Log Σ exp over the last axis."""
    wide = logits.astype(np.float64)
    peak = wide.max(-1)
    total: Floats64 = peak + np.log(np.exp(wide - peak[..., None]).sum(-1))
    return total


def score_rows(logits: Floats32, reference: Floats32, next_ids: Ints) -> RowScores:
    """Score rows [n, vocab] of a model against the reference's, teacher-forced on the same text."""
    parts = [_score(logits[i : i + _ROWS], reference[i : i + _ROWS], next_ids[i : i + _ROWS]) for i in range(0, len(next_ids), _ROWS)]
    return RowScores(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in dataclasses.fields(RowScores)))


def _score(logits: Floats32, reference: Floats32, next_ids: Ints) -> RowScores:
    q = logits.astype(np.float64) - log_sum_exp(logits)[:, None]
    p = reference.astype(np.float64) - log_sum_exp(reference)[:, None]
    rows = np.arange(len(next_ids))
    kl = np.einsum("rv,rv->r", np.exp(p), p - q)
    return RowScores(-q[rows, next_ids], -p[rows, next_ids], np.maximum(kl, 0.0), logits.argmax(1) == reference.argmax(1))


def kl_of_top(logits: Floats32, top_ids: npt.NDArray[np.integer], top_logits: Floats32, reference_lse: Floats64) -> Floats64:
    """KL(reference || model) per row with everything outside the reference's top ids taken as one event: a lower bound of the KL.

    logits [n, vocab]; top_ids and top_logits [n, m]; reference_lse [n].
    """
    p = np.exp(top_logits.astype(np.float64) - reference_lse[:, None])
    log_q = np.take_along_axis(logits, top_ids.astype(np.int64), axis=1).astype(np.float64) - log_sum_exp(logits)[:, None]
    rest_p = np.maximum(1.0 - p.sum(1), 0.0)
    rest_q = np.maximum(1.0 - np.exp(log_q).sum(1), 1e-300)
    inside = (p * (np.log(np.maximum(p, 1e-300)) - log_q)).sum(1)
    outside = np.where(rest_p > 0, rest_p * (np.log(np.maximum(rest_p, 1e-300)) - np.log(rest_q)), 0.0)
    kl: Floats64 = np.maximum(inside + outside, 0.0)
    return kl
