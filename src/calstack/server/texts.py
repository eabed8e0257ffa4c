"""Texts that an encoder has: what the engine was asked, and who waits for it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator

from calstack.errors import CalstackError
from calstack.server.errors import error_of
from calstack.wire import Encode, Encoded

__all__ = ["TextBook", "TextEntry"]

_MOST_CRASHES = 2  # in flight in so many crashes, a request is not tried again


@dataclasses.dataclass(slots=True, eq=False)
class TextEntry:
    """One accepted request."""

    message: Encode
    answer: asyncio.Future[Encoded]
    sent: bool = False
    crashes: int = 0


class TextBook:
    """Accepted requests that have no answer. All methods run on the event loop."""

    def __init__(self) -> None:
        self._entries: dict[str, TextEntry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[TextEntry]:
        return iter(list(self._entries.values()))

    def accept(self, message: Encode) -> TextEntry:
        """Add a request. Its name must be new."""
        assert message.request not in self._entries, f"request {message.request} exists"
        entry = self._entries[message.request] = TextEntry(message, asyncio.get_running_loop().create_future())
        return entry

    def forget(self, request: str) -> TextEntry | None:
        """Nobody waits for it any more."""
        return self._entries.pop(request, None)

    def record(self, encoded: Encoded) -> None:
        """Pass an answer on. A request that has ended already is ignored."""
        if (entry := self._entries.pop(encoded.request, None)) is None or entry.answer.done():
            return
        if encoded.error is not None:
            entry.answer.set_exception(error_of(encoded.error))
        else:
            entry.answer.set_result(encoded)

    def crashed(self, error: CalstackError) -> None:
        """The engine process died: what it had is asked again, unless it dies of it again."""
        for entry in self:
            entry.crashes += entry.sent
            entry.sent = False
            if entry.crashes >= _MOST_CRASHES:
                self._fail(entry, error)

    def fail_all(self, error: CalstackError) -> None:
        """No engine will answer."""
        for entry in self:
            self._fail(entry, error)

    def _fail(self, entry: TextEntry, error: CalstackError) -> None:
        del self._entries[entry.message.request]
        if not entry.answer.done():
            entry.answer.set_exception(error)
