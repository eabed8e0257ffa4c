"""Prompt lookup: what followed the last few ids the last time they came is what may follow now. Guesses cost rows, never change an id."""

from __future__ import annotations

from collections.abc import Sequence as Ids

__all__ = ["Acceptance", "Lookup"]

GRAM = 3  # ids that must agree


class Lookup:
    """Every run of GRAM ids so far and where it last ended, grown as ids become known."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}

    def extend(self, prompt: Ids[int], output: Ids[int]) -> None:
        """Take in what is known by now."""
        at, split = len(self._ids), len(prompt)
        new = [*prompt[at:], *output] if at < split else output[at - split :]
        for token in new:
            self._note()
            self._ids.append(token)

    def propose(self, most: int) -> list[int]:
        """At most `most` ids that may come next."""
        end = self._ends.get(tuple(self._ids[-GRAM:])) if len(self._ids) >= GRAM else None
        return [] if end is None else self._ids[end : end + most]

    def _note(self) -> None:
        """The last run of ids gets its end; the run at the very end is noted when an id has followed it."""
        if len(self._ids) >= GRAM:
            self._ends[tuple(self._ids[-GRAM:])] = len(self._ids)


class Acceptance:
    """How often guesses come true, as a moving share; it starts hopeful, so that a request tries."""

    __slots__ = ("share",)

    def __init__(self) -> None:
        self.share = 0.8

    def note(self, drafted: int, accepted: int) -> None:
        """Of `drafted` guesses the first `accepted` came true; those behind the first wrong one say nothing."""
        tried = min(accepted + 1, drafted)
        if tried:
            self.share += 0.25 * (accepted / tried - self.share)

    def forgive(self) -> None:
        """An id came without guesses: what did not pay may pay later."""
        self.share = max(self.share, min(self.share + 0.005, 0.5))

    def expected(self, drafted: int) -> float:
        """Ids that a launch with so many guesses should give, its own included."""
        return sum(self.share**i for i in range(drafted + 1))
