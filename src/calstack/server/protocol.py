"""The HTTP protocol with bounds that uvicorn lacks: how large a request's head may be and how long it may take to come, and how long a
client may leave an answer unread."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import struct
from collections.abc import Callable
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

__all__ = ["Bounds", "GuardedProtocol", "PeerProtocol", "bounded"]

_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_INVALID = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_CREDENTIALS = struct.Struct("3i")  # struct ucred


@dataclasses.dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of a connection."""

    head_bytes: int
    head_fields: int
    head_s: float
    write_s: float
    """A client that leaves bytes waiting for so long is cut off."""


class GuardedProtocol(HttpToolsProtocol):
    """Ends a connection whose head is too large or too slow, or whose client does not read. Made by `bounded`."""

    bounds: ClassVar[Bounds]
    on_refused: ClassVar[Callable[[int], None]]
    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _in_head = True
    _is_too_large = False
    _head_bytes = _raw_bytes = _fields = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        self._reads()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._begin_head()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head:  # what the parser holds back of an unfinished field counts too
            self._raw_bytes += len(data)
            if self._raw_bytes > self.bounds.head_bytes:
                self._refuse(_TOO_LARGE)

    def send_400_response(self, msg: str) -> None:
        """The parser gave up."""
        self._refuse(_TOO_LARGE if self._is_too_large else _INVALID)

    def timeout_keep_alive_handler(self) -> None:
        """Idle for too long; a client that has not even read the last answer is not waited for."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        super().timeout_keep_alive_handler()

    def _count(self, size: int) -> None:
        self._head_bytes += size
        self._fields += 1
        if self._head_bytes > self.bounds.head_bytes or self._fields > self.bounds.head_fields + 1:
            self._is_too_large = True
            raise ValueError("the head is too large")  # stops the parser

    def pause_writing(self) -> None:
        """What is written to the client piles up."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.bounds.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        """It has taken most of it."""
        self._reads()
        super().resume_writing()

    def _reads(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _begin_head(self) -> None:
        self._end_head()
        self._in_head = True
        self._head_bytes = self._raw_bytes = self._fields = 0
        self._head_timer = self.loop.call_later(self.bounds.head_s, self._refuse, _TOO_SLOW)

    def _end_head(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, answer: bytes) -> None:
        """Say so when the client waits for an answer to this head, and close; a client that goes on sending is reset."""
        if self.transport.is_closing():
            return
        if self._raw_bytes or answer is not _TOO_SLOW:  # browsers open connections that they may never use
            type(self).on_refused(int(answer[9:12]))
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request, whatever its annotation says
        if cycle is None or cycle.response_complete:
            self.transport.write(answer)
            self.transport.close()
        else:
            self.transport.abort()


class PeerProtocol(GuardedProtocol):
    """Tells the application who is at the other end of a unix socket: `calstack.peer` in the scope is the user's id, None over TCP."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        found = transport.get_extra_info("socket")
        self._peer: int | None = None
        if found is not None and found.family == socket.AF_UNIX:
            data = found.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            self._peer = _CREDENTIALS.unpack(data)[1]

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["calstack.peer"] = self._peer  # type: ignore[typeddict-unknown-key]


def bounded(
    bounds: Bounds, base: type[GuardedProtocol] = GuardedProtocol, on_refused: Callable[[int], None] = lambda _: None
) -> type[GuardedProtocol]:
    """`base` with these bounds; uvicorn wants a class. `on_refused` takes the status of each head that is refused."""
    return type(base.__name__, (base,), {"bounds": bounds, "on_refused": staticmethod(on_refused)})
