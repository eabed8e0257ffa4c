"""A toy grammar whose masks depend on every id before them: a wrong or late mask changes the output or is noticed."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence

import numpy as np

from calstack.engine.constraints import GrammarReady, Mask, begin
from calstack.errors import RequestError
from calstack.wire import Submit


class Ladder:
    """`vocab`, and as text `steps,break_at`: ends after `steps` ids; cannot be followed from the id `break_at` on."""

    def __init__(self, vocab: int, text: str) -> None:
        steps, broken = (int(part) for part in text.split(","))
        if steps == 0:
            raise RequestError("no such ladder", param="grammar")
        self.vocab, self.steps, self.broken = vocab, steps, broken
        self.count = self.state = 0

    def mask(self) -> Mask:
        if self.broken and self.count >= self.broken:
            raise RequestError("the ladder is broken", param="grammar")
        bits = np.zeros(-(-self.vocab // 32) * 32, np.uint8)
        bits[: self.vocab] = [self.allows(token) for token in range(self.vocab)]
        return np.packbits(bits, bitorder="little").view(np.int32)

    def allows(self, token: int) -> bool:
        return (token * 5 + self.state) % 7 < 2

    def consume(self, token: int) -> bool:
        if self.finished or not self.allows(token):
            return False
        self.count += 1
        self.state = (self.state * 31 + token + 1) % 1009
        return True

    def peek(self, ids: Sequence[int]) -> list[Mask]:
        ahead = copy.copy(self)
        masks: list[Mask] = []
        for token in ids:
            if not ahead.consume(token) or ahead.finished:
                break
            masks.append(ahead.mask())
        return masks

    def forced(self) -> list[int]:
        return []

    @property
    def finished(self) -> bool:
        return self.count >= self.steps


def ladders(vocab: int) -> Callable[[str], Ladder]:
    return lambda text: Ladder(vocab, text)


class AtOnce:
    """Builds ladders when they are taken: no thread, so that time stays virtual."""

    def __init__(self, vocab: int) -> None:
        self.built, self.todo = ladders(vocab), list[Submit]()
        self.notify: Callable[[], None] | None = None

    def begin(self, submit: Submit) -> None:
        self.todo.append(submit)

    def take(self) -> list[GrammarReady]:
        ready = [begin(self.built, submit) for submit in self.todo]
        self.todo.clear()
        return ready

    @property
    def pending(self) -> int:
        return len(self.todo)

    def wait(self, timeout_s: float) -> None:
        time.sleep(0)

    def close(self) -> None:
        self.todo.clear()
