"""`calstack ops` and `calstack audit`: what an operator types."""

from __future__ import annotations

import dataclasses
import http.client
import json
import socket
from pathlib import Path
from typing import Any

import click

from calstack.errors import CalstackError, UsageError

__all__ = ["audit", "ops"]

_TIMEOUT_S = 90.0


@dataclasses.dataclass(frozen=True, slots=True)
class _Plane:
    """Where a server's operations plane is."""

    socket: Path | None
    port: int
    token: str

    def call(self, method: str, path: str, **order: Any) -> None:
        """Send one order and print the answer. Raises CalstackError with the server's words when it is refused."""
        headers = {"authorization": f"Bearer {self.token}"} if self.token else {}
        connection = _UnixConnection(self.socket) if self.socket is not None else http.client.HTTPConnection("127.0.0.1", self.port)
        connection.timeout = _TIMEOUT_S
        try:
            connection.request(method, path, json.dumps(order) if method == "POST" else None, headers)
            response = connection.getresponse()
            value = json.loads(response.read(1 << 20))
        except (OSError, http.client.HTTPException, ValueError) as error:
            where = str(self.socket or f"127.0.0.1:{self.port}")
            raise CalstackError(f"the operations plane does not answer: {error}", where=where, remedy="is the server running?") from error
        finally:
            connection.close()
        if response.status != 200:
            raise CalstackError(str(value.get("error", {}).get("message", value)), where=path)
        click.echo(json.dumps(value, indent=1))


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


@click.group(epilog="Example: calstack ops --socket /run/calstack/ops.sock status")
@click.option("--socket", "path", type=click.Path(path_type=Path), help="The server's operations socket.")
@click.option("--port", type=click.IntRange(1, 65535), help="Its operations port on this machine instead.")
@click.option("--token", default="", help="Token, where users of this machine are not enough. Better set CALSTACK_OPS_TOKEN.")
@click.pass_context
def ops(ctx: click.Context, path: Path | None, port: int | None, token: str) -> None:
    """Look at a running server and act on it, through its operations plane."""
    if (path is None) == (port is None):
        raise UsageError("give --socket or --port", where="calstack ops", remedy="the server's log names its socket")
    ctx.obj = _Plane(path, port or 0, token)


@ops.command()
@click.pass_obj
def status(plane: _Plane) -> None:
    """Show engine, device, memory by chip, and what is in flight."""
    plane.call("GET", "/status")


@ops.command()
@click.pass_obj
def reset(plane: _Plane) -> None:
    """Reset the device; requests go on from their last token."""
    plane.call("POST", "/reset")


@ops.command()
@click.pass_obj
def dump(plane: _Plane) -> None:
    """Write the last launches into the server's dump directory."""
    plane.call("POST", "/dump")


@ops.command()
@click.option("--exit", "leave", is_flag=True, help="End the server when nothing is left.")
@click.pass_obj
def drain(plane: _Plane, leave: bool) -> None:
    """Take no new requests; those that run go on."""
    plane.call("POST", "/drain", exit=leave)


@ops.command()
@click.pass_obj
def resume(plane: _Plane) -> None:
    """Take requests again after a drain."""
    plane.call("POST", "/resume")


@ops.command("log-level")
@click.argument("level")
@click.pass_obj
def log_level(plane: _Plane, level: str) -> None:
    """Log from LEVEL on: debug, info, warning, error."""
    plane.call("POST", "/log-level", level=level)


@ops.command()
@click.argument("mode")
@click.pass_obj
def power(plane: _Plane, mode: str) -> None:
    """Choose the device's power MODE."""
    plane.call("POST", "/power", mode=mode)


@ops.command()
@click.argument("name")
@click.pass_obj
def register(plane: _Plane, name: str) -> None:
    """Read the device register NAME, if the configuration allows it."""
    plane.call("POST", "/register", name=name)


@click.group(epilog="Example: calstack audit verify /var/log/calstack/audit.jsonl")
def audit() -> None:
    """Audit logs of the operations plane."""


@audit.command()
@click.argument("log", type=click.Path(path_type=Path))
@click.option("--head", help="Hash that the last record must have, noted elsewhere; without it a cut end does not show.")
def verify(log: Path, head: str | None) -> None:
    """Check the hash chain of LOG; fails with the first line that does not fit."""
    from calstack.server.ops.audit import verify as verify_log

    chain = verify_log(log, head)
    click.echo(f"{chain.records} records, head {chain.head}")
