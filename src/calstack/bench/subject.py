"""What is measured: ours or a peer's, behind one small interface, so that runs can alternate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["Subject", "decode_window", "prompt_ids"]


class Subject(Protocol):
    """Something that prefills and decodes. Times are the subject's own best view of the work, seconds."""

    @property
    def name(self) -> str:
        """Printed in reports."""
        ...

    def prefill(self, tokens: int) -> float:
        """Seconds to process a prompt of `tokens` from an empty cache."""
        ...

    def decode(self, depth: int, batch: int, steps: int) -> float:
        """Seconds for `steps` decode steps of `batch` sequences, each with `depth` positions in the cache before the first."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


def prompt_ids(count: int, vocab: int, *, salt: int = 0) -> list[int]:
    """`count` pseudo-random token ids (a fixed linear congruential sequence): every subject gets the same."""
    state = 12345 + salt
    ids = []
    for _ in range(count):
        state = (state * 1103515245 + 12345) & 0x7FFFFFFF
        ids.append((state >> 8) % vocab)
    return ids


def decode_window(streams: Sequence[Sequence[float]], steps: int) -> float:
    """Seconds of `steps` decode steps, from the arrival times of every stream's tokens: the window in which all of them decode
    (from the last first token to the first end), scaled to `steps` tokens of each stream."""
    start = max(events[0] for events in streams)
    end = min(events[-1] for events in streams)
    tokens = sum(sum(start < at <= end for at in events) for events in streams)
    return (end - start) * steps * len(streams) / tokens
