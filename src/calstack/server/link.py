"""The connection to the engine process: frames of wire.py over a unix socket."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import cast

import msgspec

from calstack.errors import ArtifactError
from calstack.wire import MAX_MESSAGE_BYTES, EngineMessage, ServerMessage

__all__ = ["EngineLink"]

_LENGTH = struct.Struct("<I")


class EngineLink(asyncio.Protocol):
    """Frames in and out. Both callbacks run on the event loop; `on_lost` is called once.

    Args:
        on_message: takes each message of the engine.
        on_lost: takes what broke the connection, None when the engine closed it.
    """

    def __init__(self, on_message: Callable[[EngineMessage], None], on_lost: Callable[[Exception | None], None]) -> None:
        self._on_message, self._on_lost = on_message, on_lost
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(EngineMessage).decode
        self._broken: Exception | None = None

    def send(self, message: ServerMessage) -> None:
        """Queue one message; without effect once the connection is gone (the supervisor resubmits what was lost)."""
        if self._transport is not None and not self._transport.is_closing():
            body = self._encode(message)
            self._transport.write(_LENGTH.pack(len(body)) + body)

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost(self._broken or exc)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        start = 0
        while (end := self._frame_end(start)) is not None:
            if not self._take(memoryview(self._buffer)[start + 4 : end]):
                return
            start = end
        if start:
            del self._buffer[:start]

    def _frame_end(self, start: int) -> int | None:
        if len(self._buffer) < start + 4:
            return None
        (size,) = _LENGTH.unpack_from(self._buffer, start)
        if size > MAX_MESSAGE_BYTES:
            self._break(ArtifactError(f"the engine announced a message of {size} bytes", remedy="it is not of this version"))
            return None
        end = start + 4 + int(size)
        return end if len(self._buffer) >= end else None

    def _take(self, frame: memoryview) -> bool:
        try:
            message = self._decode(frame)
        except msgspec.MsgspecError as error:
            self._break(error)
            return False
        finally:
            frame.release()
        self._on_message(message)
        return True

    def _break(self, error: Exception) -> None:
        self._broken = self._broken or error
        if self._transport is not None:
            self._transport.abort()
