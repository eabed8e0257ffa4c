"""Counts the tokens of a thought and says when its budget is spent."""

from __future__ import annotations

from calstack.text.output import CLOSE_THOUGHT, OPEN_THOUGHT, Thinking

__all__ = ["ThoughtMeter"]


class ThoughtMeter:
    """Follows one output, token by token.

    Args:
        thinking: where a thought may begin.
        budget: tokens after which it should be closed; None = no bound.
    """

    __slots__ = ("_budget", "_state", "_tail", "tokens")

    def __init__(self, thinking: Thinking, budget: int | None = None) -> None:
        self._state, self._budget = thinking, budget
        self._tail = ""
        self.tokens = 0

    def push(self, text: str) -> None:
        """One token gave `text`."""
        if self._state is Thinking.OFF:
            return
        self._tail = (self._tail + text)[-(len(CLOSE_THOUGHT) + len(text)) :]
        self.tokens += 1
        if self._state is Thinking.MAYBE:
            self._begin()
        elif CLOSE_THOUGHT in self._tail:
            self._state = Thinking.OFF

    @property
    def spent(self) -> bool:
        """Whether a thought is open and has used its budget."""
        return self._state is Thinking.OPEN and self._budget is not None and self.tokens >= self._budget

    def close(self) -> None:
        """The thought ends here."""
        self._state = Thinking.OFF

    def _begin(self) -> None:
        begun = self._tail.lstrip()
        if begun.startswith(OPEN_THOUGHT):
            self._state = Thinking.OPEN
        elif begun and not OPEN_THOUGHT.startswith(begun):
            self._state, self.tokens = Thinking.OFF, 0
