"""Stop strings over text that arrives in pieces of any size."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["StopMatcher"]


class StopMatcher:
    """Finds the stop string that is completed first and lets out the text before it, each character exactly once.

    The result depends on the text alone, not on how it was cut: the match with the smallest end wins, the longest of those.
    Text that could still become a stop string is held back until it cannot, or until `flush`.

    Args:
        stops: stop strings; empty ones are ignored.
    """

    __slots__ = ("_held", "_stops", "matched")

    def __init__(self, stops: Iterable[str] = ()) -> None:
        self._stops = tuple(dict.fromkeys(stop for stop in stops if stop))
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Text that may go out now. After a match (`matched` is set) nothing more goes out."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        buffer = self._held + text
        if (found := self._first(buffer)) is not None:
            start, self.matched, self._held = found[0], found[1], ""
            return buffer[:start]
        keep = self._longest_beginning(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def flush(self) -> str:
        """Held-back text at the end of the sequence."""
        held, self._held = self._held, ""
        return held

    def _first(self, buffer: str) -> tuple[int, str] | None:
        places = ((buffer.find(stop), stop) for stop in self._stops)
        ends = [(at + len(stop), at, stop) for at, stop in places if at >= 0]
        return min(ends)[1:] if ends else None

    def _longest_beginning(self, buffer: str) -> int:
        """Length of the longest end of `buffer` that some stop string begins with."""
        return max(_overlap(buffer, stop) for stop in self._stops)


def _overlap(buffer: str, stop: str) -> int:
    for size in range(min(len(buffer), len(stop) - 1), 0, -1):
        if buffer.endswith(stop[:size]):
            return size
    return 0
