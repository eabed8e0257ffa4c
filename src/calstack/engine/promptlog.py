"""Log-probabilities of a prompt's own ids, gathered chunk by chunk from the logits of all its rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from calstack.wire import TokenLogprob

__all__ = ["PROMPT_LOG_ROWS", "PromptLog"]

PROMPT_LOG_ROWS = 32  # most rows of a launch whose logits come back: they are vocab x 4 bytes each


class PromptLog:
    """Row p of the prompt's logits speaks of the id at p + 1; the first id has none.

    Args:
        prompt: ids.
        top: how many of the most likely ids are named at each position.
    """

    def __init__(self, prompt: Sequence[int], top: int) -> None:
        self._prompt, self._top = prompt, top
        self._found: list[TokenLogprob] = []
        self.given = len(prompt) < 2

    def wants(self, start: int) -> bool:
        """Whether logits of rows from position `start` on are needed."""
        return not self.given and start < len(self._prompt) - 1

    def take(self, start: int, logits: npt.NDArray[np.float32] | None) -> None:
        """Rows of a launch that began at position `start`, [rows, vocab]; those that are known already are skipped (a request that started
        over). None when the launch had none to give."""
        if logits is None or not self.wants(start):
            return
        first = len(self._found)
        rows = min(len(logits), len(self._prompt) - 1 - start)
        for row in range(first - start, rows):
            self._found.append(self._one(logits[row], self._prompt[start + row + 1]))

    def complete(self) -> tuple[TokenLogprob, ...] | None:
        """All of them, once: ids 1 to the last."""
        if self.given or len(self._found) < len(self._prompt) - 1:
            return None
        self.given = True
        return tuple(self._found)

    def _one(self, row: npt.NDArray[np.float32], id_: int) -> TokenLogprob:
        """docs/concepts/numerics.md: z - zmax - log(Σ exp(z - zmax)), the sum in f64."""
        shifted = (row - row.max()).astype(np.float64)
        log_sum = np.log(np.exp(shifted).sum())
        tops: Sequence[int] = ()
        if self._top > 0:
            most = np.argpartition(-row, min(self._top, len(row) - 1))[: self._top]
            tops = [int(i) for i in most[np.lexsort((most, -row[most]))]]
        return TokenLogprob(
            logprob=float(shifted[id_] - log_sum), top_ids=tuple(tops), top_logprobs=tuple(float(shifted[i] - log_sum) for i in tops)
        )
