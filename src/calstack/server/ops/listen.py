"""Where the operations plane listens."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

from calstack.server.config import OpsConfig
from calstack.server.listen import HttpServer, bind_tcp, bind_unix, http_config
from calstack.server.ops.plane import OpsPlane
from calstack.server.protocol import Bounds, PeerProtocol, bounded

__all__ = ["ops_server", "ops_sockets"]

_BOUNDS = Bounds(head_bytes=16 << 10, head_fields=50, head_s=5.0, write_s=10.0)
_CONNECTIONS = 32
_IDLE_S = 15.0


@contextlib.contextmanager
def ops_sockets(config: OpsConfig, directory: Path, *, others: bool) -> Iterator[list[socket.socket]]:
    """The open sockets: a unix one, which only this user may open unless `others` are known too, and a TCP one where it is asked for."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(bind_unix(config.socket or directory / "ops.sock", 0o666 if others else 0o600))]
        if config.port:
            found.append(stack.enter_context(bind_tcp("127.0.0.1", config.port)))
        yield found


def ops_server(plane: OpsPlane) -> HttpServer:
    """Serves the plane."""
    return HttpServer(http_config(plane, bounded(_BOUNDS, PeerProtocol), connections=_CONNECTIONS, idle_s=_IDLE_S))
