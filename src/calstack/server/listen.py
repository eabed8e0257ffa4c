"""Sockets that the server listens on, and uvicorn without what this server does itself."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import stat
from collections.abc import Generator, Iterator
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from calstack.errors import UsageError
from calstack.server.config import ListenConfig
from calstack.server.protocol import GuardedProtocol

__all__ = ["HttpServer", "bind_tcp", "bind_unix", "http_config", "public_socket", "tls_context", "url_of"]

_BACKLOG = 2048
_CLOSE_S = 2  # for the last bytes of answers, after every choice has ended


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers and without its ten wake-ups a second; ends when `stop` is set."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stop = asyncio.Event()

    async def main_loop(self) -> None:
        await self.stop.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def http_config(
    app: ASGIApp, protocol: type[GuardedProtocol], *, connections: int, idle_s: float, tls: ssl.SSLContext | None = None
) -> uvicorn.Config:
    """How uvicorn serves `app`: at most `connections` at once (more get a 503), each closed after `idle_s` without a request."""
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=idle_s,  # type: ignore[arg-type]  # call_later takes parts of seconds too
        timeout_graceful_shutdown=_CLOSE_S,
        limit_concurrency=connections,
        proxy_headers=False,
    )
    config.load()
    config.ssl = tls
    return config


@contextlib.contextmanager
def public_socket(listen: ListenConfig) -> Iterator[socket.socket]:
    """The socket that `listen` asks for, open. Raises UsageError when it cannot be had."""
    if listen.uds is None:
        with bind_tcp(listen.host, listen.port) as found:
            yield found
    else:
        with bind_unix(listen.uds, 0o666) as found:
            yield found


def bind_tcp(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 takes a free one. Raises UsageError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, UnicodeError) as error:
        what = error.strerror if isinstance(error, OSError) else "not a host name"
        raise UsageError(f"cannot listen: {what}", where=f"{host}:{port}", remedy="take another --host or --port") from error


@contextlib.contextmanager
def bind_unix(path: Path, mode: int) -> Iterator[socket.socket]:
    """A listening unix socket, removed at the end. One that nobody listens on any more is replaced.

    Raises:
        UsageError: when another process listens there, something else stands there, or the path is too long.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as found:
        try:
            _remove_dead(path)
            os.fchmod(found.fileno(), mode)  # before bind: the file never has another mode
            found.bind(str(path))
            path.chmod(mode)  # the umask took bits away
            found.listen(_BACKLOG)
        except OSError as error:
            raise UsageError(f"cannot listen: {error.strerror or error}", where=str(path), remedy="take another socket path") from error
        try:
            yield found
        finally:
            path.unlink(missing_ok=True)


def _remove_dead(path: Path) -> None:
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise UsageError("exists and is no socket", where=str(path), remedy="take another socket path")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise UsageError("another process listens there", where=str(path), remedy="take another socket path")


def tls_context(listen: ListenConfig) -> ssl.SSLContext | None:
    """TLS 1.2 and newer with the configured certificate; None without one. Raises UsageError when it cannot be used."""
    if listen.tls_cert is None and listen.tls_key is None:
        return None
    if listen.tls_cert is None:
        raise UsageError("has no certificate", where="listen.tls_key", remedy="set listen.tls_cert too")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(listen.tls_cert, listen.tls_key, password="")  # an encrypted key is an error, not a question
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(f"certificate or key cannot be used: {reason}", where=str(listen.tls_cert), remedy="give PEM files") from error
    return context


def url_of(listen: ListenConfig, listener: socket.socket) -> str:
    """Where clients find the socket; `unix:PATH` for a unix socket."""
    if listen.uds is not None:
        return f"unix:{listen.uds}"
    scheme = "https" if listen.tls_cert is not None else "http"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(listen.host, listen.host)  # noqa: S104  # nothing is bound here
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
