"""Writes the reference pages that come from code: the command line's help, settings, schemas. `--check` fails on a difference instead."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import click
import msgspec

from calstack.calbin.manifest import Manifest
from calstack.calbin.program import Program
from calstack.cli.app import COMMANDS, LazyGroup, cli
from calstack.cli.serve import PREFIX
from calstack.cli.settings import reference_page
from calstack.server.config import ServeConfig

REFERENCE = Path("docs/reference")


def command_line() -> str:
    """The help of every command, as docs/reference/cli.md."""
    parts = ["# The command line", "Written by `make gen` from the commands themselves.", _help_of(cli, "calstack")]
    group = cli
    if not isinstance(group, LazyGroup):
        raise TypeError("the command group is lazy")
    with click.Context(group, info_name="calstack") as ctx:
        for name in COMMANDS:
            command = group.get_command(ctx, name)
            if command is not None:
                parts += [f"## calstack {name}", _help_of(command, name, ctx), *_helps_below(command, name, ctx)]
    return "\n\n".join(parts) + "\n"


def _helps_below(command: click.Command, name: str, parent: click.Context) -> list[str]:
    """The help of a group's commands."""
    if not isinstance(command, click.Group):
        return []
    with click.Context(command, info_name=name, parent=parent) as ctx:
        return [part for sub, found in command.commands.items() for part in (f"### calstack {name} {sub}", _help_of(found, sub, ctx))]


def dashboard() -> str:
    """The Grafana dashboard."""
    return str(runpy.run_path("tools/dashboard.py")["dashboard"]())


def schema(kind: type) -> str:
    """The JSON Schema of a message type."""
    return msgspec.json.format(msgspec.json.encode(msgspec.json.schema(kind)), indent=1).decode() + "\n"


def configuration() -> str:
    """The settings of `calstack serve`, as docs/reference/configuration.md."""
    intro = """Written by `make gen` from the dataclasses of `calstack.server.config`.

`calstack serve` takes each setting from the first of: option, variable, the TOML file that `--config` (or `CALSTACK_SERVE_CONFIG`) names,
default. Keys of the file and variables that begin with `CALSTACK_SERVE_` must be known; a wrong one is refused with the nearest name.
Sizes may be written as `512M` or `2GiB`. Lists are repeated options, words of a variable, lists in the file. Relative paths begin at the
working directory. `calbin` may stand at the top of the file (or in `CALSTACK_SERVE_CALBIN`) instead of on the command line.

```toml
calbin = "models/smollm2.calbin"
grace_s = 60

[listen]
port = 8000

[engine]
kv_memory = "2GiB"
```"""
    return reference_page(ServeConfig, PREFIX, "Configuration of calstack serve", intro)


GENERATED: dict[Path, Callable[[], str]] = {
    Path("deploy/grafana/calstack.json"): dashboard,
    REFERENCE / "cli.md": command_line,
    REFERENCE / "configuration.md": configuration,
    REFERENCE / "manifest.schema.json": lambda: schema(Manifest),
    REFERENCE / "program.schema.json": lambda: schema(Program),
}


def main(arguments: list[str]) -> int:
    check, stale = "--check" in arguments, []
    for path, make in GENERATED.items():
        text = make()
        if path.is_file() and path.read_text("utf-8") == text:
            continue
        stale.append(str(path))
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
    if check and stale:
        print(f"not up to date, run `make gen`: {', '.join(stale)}", file=sys.stderr)
        return 1
    print(f"generated: {', '.join(stale) or 'nothing changed'}")
    return 0


def _help_of(command: click.Command, name: str, parent: click.Context | None = None) -> str:
    with click.Context(command, info_name=name, parent=parent, terminal_width=110, max_content_width=110) as ctx:
        return f"```text\n{command.get_help(ctx)}\n```"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
