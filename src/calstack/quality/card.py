"""The quality card: how far a calbin is from the reference, on a named text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from calstack.progress import Progress
from calstack.quality.feed import Feeder
from calstack.quality.metrics import RowScores, score_rows
from calstack.quality.text import WINDOW, QualityText, token_windows
from calstack.specs import Role

if TYPE_CHECKING:
    from calstack.calbin.manifest import Manifest, SourceInfo
    from calstack.graph.evaluate import Oracle
    from calstack.specs import ModelSpec

__all__ = ["QualityCard", "TextRef", "card_windows", "measure"]

_MOST_WINDOWS, _LEAST_WINDOWS = 8, 2
_BUDGET = 5e11  # multiply-adds of the reference that a compile spends on its card
_DIGITS = 7


class TextRef(msgspec.Struct, frozen=True, kw_only=True):
    """Which text was used."""

    name: str
    sha256: str


class QualityCard(msgspec.Struct, frozen=True, kw_only=True):
    """`quality.json`. Windows of `window` tokens without overlap, the second half of each scored, as llama-perplexity does."""

    text: TextRef
    reference: str  # what the calbin is compared with
    window: int
    windows: int
    scored: int  # tokens
    perplexity: float
    reference_perplexity: float
    kl_mean: float  # KL(reference || calbin), nats a token
    kl_p99: float
    kl_max: float
    top1: float  # share of positions where both have the same most likely token


def card_windows(macs_per_token: float) -> int:
    """How many windows a compile measures: fixed by the model's size, so that a card is the same every time."""
    return int(np.clip(_BUDGET // (macs_per_token * WINDOW), _LEAST_WINDOWS, _MOST_WINDOWS))


def measure(
    feeder: Feeder, manifest: Manifest, oracle: Oracle, tokenizer_json: bytes, text: QualityText, windows: int, progress: Progress
) -> QualityCard:
    """Run calbin and reference over the text's first `windows` windows.

    Raises:
        UsageError: when the text is too short.
    """
    submodel = max((s for s in manifest.submodels if s.role is Role.PREFILL), key=lambda s: s.rows)
    size = min(WINDOW, submodel.context)
    ids = token_windows(text, tokenizer_json, most=windows, bos=bos_of(manifest.model), window=size)
    progress.stage("quality", len(ids))
    half = size // 2
    parts = []
    for window in ids:
        row = [int(token) for token in window]
        logits = feeder.run(submodel, [row], first=half)[0]
        parts.append(score_rows(logits[:-1], oracle.logits(row)[half:-1], window[half + 1 :]))
        progress.advance()
    return _card(parts, text, size, manifest.source)


def bos_of(spec: ModelSpec) -> int | None:
    """The id that starts a text, where the model wants one."""
    return spec.bos_ids[0] if spec.add_bos and spec.bos_ids else None


def _card(parts: Iterable[RowScores], text: QualityText, window: int, source: SourceInfo) -> QualityCard:
    parts = list(parts)
    nll, reference, kl, agree = (np.concatenate([getattr(p, name) for p in parts]) for name in ("nll", "reference_nll", "kl", "agree"))
    gguf = "gguf" in {source.kind, source.origin}
    weights = "the file's weights dequantised to f32" if gguf else "the source's weights in f32"
    return QualityCard(
        text=TextRef(name=text.name, sha256=text.sha256),
        reference=f"onnxruntime on {weights}",
        window=window,
        windows=len(parts),
        scored=len(nll),
        perplexity=_round(np.exp(nll.mean())),
        reference_perplexity=_round(np.exp(reference.mean())),
        kl_mean=_round(kl.mean()),
        kl_p99=_round(np.quantile(kl, 0.99)),
        kl_max=_round(kl.max()),
        top1=_round(agree.mean()),
    )


def _round(value: float) -> float:
    """Seven significant digits: what a reader can use, and the same on every machine in practice."""
    return float(f"{float(value):.{_DIGITS}g}")
