"""Writes the reference pages that come from code: the command line's help and JSON schemas. `--check` fails on a difference instead."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import click
import msgspec

from calstack.calbin.manifest import Manifest
from calstack.calbin.program import Program
from calstack.cli.app import COMMANDS, LazyGroup, cli

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
                parts += [f"## calstack {name}", _help_of(command, name, ctx)]
    return "\n\n".join(parts) + "\n"


def schema(kind: type) -> str:
    """The JSON Schema of a message type."""
    return msgspec.json.format(msgspec.json.encode(msgspec.json.schema(kind)), indent=1).decode() + "\n"


GENERATED: dict[Path, Callable[[], str]] = {
    REFERENCE / "cli.md": command_line,
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
