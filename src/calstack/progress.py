"""How long work tells what it does: the command line draws it, everything else stays silent."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Progress", "Silent"]


class Progress(Protocol):
    """Receives the stages of one piece of long work, in order."""

    def stage(self, name: str, total: int = 0) -> None:
        """A stage begins, which ends the one before. `total` is its units of work; 0 = not known."""
        ...

    def advance(self, units: int = 1) -> None:
        """`units` more of the current stage are done."""
        ...


class Silent:
    """Progress that nobody watches."""

    def stage(self, name: str, total: int = 0) -> None:
        pass

    def advance(self, units: int = 1) -> None:
        pass
