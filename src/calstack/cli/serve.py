"""`calstack serve`: its options are the leaves of `server.config.ServeConfig`, so that none can be forgotten."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from calstack.cli.params import CALBIN
from calstack.cli.settings import build_config, check_variables, leaves, option_of, read_file
from calstack.errors import UsageError
from calstack.server.config import ServeConfig

__all__ = ["PREFIX", "config_options", "serve"]

PREFIX = "CALSTACK_SERVE_"


def config_options(command: click.Command) -> click.Command:
    """Add an option per leaf of ServeConfig."""
    command.params.extend(map(option_of, leaves(ServeConfig)))
    return command


def _take_file(ctx: click.Context, _param: click.Parameter, path: Path | None) -> Path | None:
    """Values of the file become defaults, so that variables and options come before them."""
    check_variables(os.environ, PREFIX, [param.name for param in ctx.command.params if param.name])
    if path is not None:
        ctx.default_map = {**(ctx.default_map or {}), **read_file(path, ServeConfig, also=("calbin",))}
    return path


@config_options
@click.command(epilog="Example: calstack serve m.calbin --port 8080 --max-queued-requests 64")
@click.argument("calbin", type=CALBIN, required=False, envvar=f"{PREFIX}CALBIN")
@click.option(
    "--config", type=click.Path(path_type=Path), is_eager=True, callback=_take_file, expose_value=False, help="TOML file of settings."
)
def serve(calbin: Path | None, **values: Any) -> None:
    """Serve CALBIN over HTTP with OpenAI's routes, until SIGINT or SIGTERM.

    Settings come from options, variables (CALSTACK_SERVE_PORT), the file, and defaults, in this order; docs/reference/configuration.md
    lists them.
    """
    if calbin is None:
        raise UsageError("no calbin is given", remedy="name its directory, or set `calbin` in the file")
    config = build_config(ServeConfig, {**values, "calbin": calbin})
    config.check()
    from calstack.server.main import serve as run_server

    run_server(config, notify=_notifier(os.environ.get("NOTIFY_SOCKET", "")))


def _notifier(address: str) -> Callable[[str], None]:
    """Tells a service manager (sd_notify's protocol) at a unix socket, `@` for an abstract one; nobody when there is none."""

    def tell(state: str) -> None:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(state.encode(), "\0" + address[1:] if address.startswith("@") else address)

    return tell if address else lambda _: None
