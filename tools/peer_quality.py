"""Perplexity, KL to the reference and top-1 agreement of a calbin and of llama.cpp on the same GGUF file and the same tokens.

Windows of 512 tokens of the bundled text, the second half of each scored, as llama-perplexity does. The reference is onnxruntime
on the file's weights dequantised to f32.

Usage: python tools/peer_quality.py MODEL.gguf CALBIN[,CALBIN…] [WINDOWS]     (needs llama-cpp-python; 64 windows take some minutes)
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from calstack import api
from calstack.frontends import open_source
from calstack.graph.evaluate import Oracle
from calstack.quality.text import bundled_text

WINDOW = 512
Logs = npt.NDArray[np.float64]


def log_softmax(logits: npt.NDArray[Any]) -> Logs:
    """Over the last axis, f64."""
    z = logits.astype(np.float64)
    z -= z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))  # type: ignore[no-any-return]  # numpy's stub loses the dtype here


class Tally:
    """Sums over scored positions of one contestant."""

    def __init__(self) -> None:
        self.nll = self.kl = self.agree = 0.0
        self.count = 0

    def add(self, ids: npt.NDArray[np.int64], own: Logs, reference: Logs) -> None:
        """One window: `own` and `reference` are log-probabilities `[rows, vocab]` that predict `ids`."""
        self.nll -= float(own[np.arange(len(ids)), ids].sum())
        self.kl += float((np.exp(reference) * (reference - own)).sum())
        self.agree += int((own.argmax(-1) == reference.argmax(-1)).sum())
        self.count += len(ids)

    def line(self, name: str) -> str:
        """One line for people."""
        n = self.count
        return f"{name:10s} perplexity {np.exp(self.nll / n):8.4f}  KL {self.kl / n:.5f}  top-1 {100 * self.agree / n:.2f} %  ({n} tokens)"


class Llama:
    """llama.cpp with all logits, f16 KV, its defaults else."""

    def __init__(self, model: str) -> None:
        self._llama = llama_cpp.Llama(model, n_ctx=WINDOW, n_batch=WINDOW, n_threads=2, logits_all=True, verbose=False)

    def logits(self, ids: list[int]) -> npt.NDArray[np.float32]:
        """`[len(ids), vocab]`."""
        self._llama.reset()
        self._llama.eval(ids)
        return np.asarray(self._llama.scores[: len(ids)])


def main(model: str, calbins: list[str], windows: int) -> None:
    """Print a line per contestant."""
    oracle, peer = Oracle(open_source(Path(model))), Llama(model)
    tallies = {name: Tally() for name in ("reference", *calbins, "llama.cpp")}
    text = bundled_text()
    with contextlib.ExitStack() as stack:
        ours = {name: stack.enter_context(api.load(name)) for name in calbins}
        ids = next(iter(ours.values())).encode(text.text)[: windows * WINDOW]
        for start in range(0, len(ids) - WINDOW + 1, WINDOW):
            part = ids[start : start + WINDOW]
            half = slice(WINDOW // 2 - 1, WINDOW - 1)
            scored = np.asarray(part[WINDOW // 2 :])
            reference = log_softmax(oracle.logits(part)[half])
            tallies["reference"].add(scored, reference, reference)
            tallies["llama.cpp"].add(scored, log_softmax(peer.logits(part)[half]), reference)
            for name, llm in ours.items():
                tallies[name].add(scored, log_softmax(np.concatenate(list(llm.score(part)))[half]), reference)
    print(f"text {text.name}, {len(ids) // WINDOW} windows of {WINDOW}")
    for name, tally in tallies.items():
        print(tally.line(Path(name).name))


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        raise SystemExit(__doc__)
    main(sys.argv[1], sys.argv[2].split(","), int(sys.argv[3]) if len(sys.argv) == 4 else 64)
