"""How the server is told to end."""

from __future__ import annotations

import asyncio

__all__ = ["StopSwitch"]


class StopSwitch:
    """Pressed once: drain. Pressed twice: now."""

    def __init__(self) -> None:
        self.drain, self.now = asyncio.Event(), asyncio.Event()

    def press(self) -> None:
        """Call on the event loop."""
        (self.now if self.drain.is_set() else self.drain).set()
