"""The engine's end of the connection to the API process: frames of wire.py over a unix socket, never blocking."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

import msgspec

from calstack.errors import CalstackError, UnavailableError
from calstack.wire import MAX_MESSAGE_BYTES, EngineMessage, ServerMessage

__all__ = ["ServerLink"]

_LENGTH = struct.Struct("<I")
_CHUNK = 1 << 16
_CONNECT_TIMEOUT_S = 10.0
_FLUSH_TIMEOUT_S = 2.0


class ServerLink:
    """A connected socket with frames in and out. `lost` once the peer is gone; then sends have no effect."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock, self.lost = sock, False
        self._in, self._out = bytearray(), bytearray()
        self._encode = msgspec.msgpack.Encoder().encode
        self._decoder = msgspec.msgpack.Decoder(ServerMessage)

    @staticmethod
    def connect(path: Path) -> ServerLink:
        """Connect to the API process. Raises UnavailableError when nobody listens there."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(_CONNECT_TIMEOUT_S)
        try:
            sock.connect(str(path))
        except OSError as error:
            sock.close()
            raise UnavailableError(f"cannot connect to the server: {error.strerror or error}") from error
        return ServerLink(sock)

    @property
    def pending(self) -> bool:
        """True while bytes wait to be written."""
        return bool(self._out)

    def send(self, message: EngineMessage) -> None:
        """Queue a message and write what the socket takes. A peer that reads nothing for too long counts as lost."""
        if self.lost:
            return
        body = self._encode(message)
        self._out += _LENGTH.pack(len(body)) + body
        self.flush()
        if len(self._out) > MAX_MESSAGE_BYTES:
            self.close()

    def flush(self) -> None:
        """Write what the socket takes now."""
        try:
            while self._out and not self.lost:
                sent = self.sock.send(memoryview(self._out)[:_CHUNK])
                del self._out[:sent]
        except BlockingIOError:
            return
        except OSError:
            self.close()

    def receive(self) -> list[ServerMessage]:
        """All complete messages that have arrived. Raises CalstackError when the peer does not speak wire.py."""
        while not self.lost:
            try:
                data = self.sock.recv(_CHUNK)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.close()
            self._in += data
            if len(data) < _CHUNK:
                break
        return self._messages()

    def finish(self) -> None:
        """Write the rest, waiting a little for a slow peer, and close."""
        if not self.lost and self._out:
            self.sock.settimeout(_FLUSH_TIMEOUT_S)
            try:
                self.sock.sendall(self._out)
            except OSError:
                self.lost = True
        self.close()

    def close(self) -> None:
        """Close the socket; idempotent."""
        self.lost = True
        self._out.clear()
        self.sock.close()

    def _messages(self) -> list[ServerMessage]:
        found: list[ServerMessage] = []
        start = 0
        while len(self._in) >= start + 4:
            (size,) = _LENGTH.unpack_from(self._in, start)
            if size > MAX_MESSAGE_BYTES:
                raise CalstackError(f"the server announced a message of {size} bytes", where="engine socket")
            if len(self._in) < start + 4 + size:
                break
            found.append(self._decode(bytes(self._in[start + 4 : start + 4 + size])))
            start += 4 + size
        del self._in[:start]
        return found

    def _decode(self, body: bytes) -> ServerMessage:
        try:
            return self._decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise CalstackError(f"a message of the server is not valid: {error}", where="engine socket") from error
