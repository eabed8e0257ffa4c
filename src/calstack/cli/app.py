"""The command group, and the one place that turns errors into lines and exit codes.

Commands are imported when they are used: `calstack --help` loads click and this file alone.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import click

from calstack import __version__
from calstack.errors import CalstackError

__all__ = ["Context", "cli", "main"]

INTERRUPTED, TERMINATED, PIPE_CLOSED = 130, 143, 1

# name → (module:attribute, one line for `calstack --help`)
COMMANDS = {
    "pull": ("calstack.cli.compile:pull", "Fetch a model, compile it if needed, print the calbin's path."),
    "compile": ("calstack.cli.compile:compile_command", "Compile a model into a calbin."),
    "plan": ("calstack.cli.plan:plan", "Say what a model takes on a target and how fast it should run, before compiling."),
    "inventory": ("calstack.cli.plan:inventory", "List a model's operators and what becomes of them."),
    "targets": ("calstack.cli.plan:targets", "List the targets, or measure this machine."),
    "inspect": ("calstack.cli.artifact:inspect", "Show what a calbin holds."),
    "explain-mismatch": ("calstack.cli.mismatch:explain_mismatch", "Say field by field why a calbin does not fit a device or a request."),
    "verify": ("calstack.cli.artifact:verify", "Check a calbin's files and golden outputs on a device."),
    "run": ("calstack.cli.run:run", "Answer a prompt in the terminal, or chat."),
    "serve": ("calstack.cli.serve:serve", "Serve a calbin over HTTP."),
    "ops": ("calstack.cli.ops:ops", "Look at a running server and act on it."),
    "audit": ("calstack.cli.ops:audit", "Check an audit log."),
    "replay": ("calstack.cli.replay:replay", "Run recorded launches again, bit for bit."),
    "profile": ("calstack.bench.profile:profile", "Show where one launch's time goes, call by call."),
    "bench": ("calstack.bench.cli:bench", "Measure a calbin's speed, in turn with peers."),
}
HIDDEN = {"engine": ("calstack.cli.engine:engine", "The engine process; `calstack serve` starts it.")}


@dataclass(frozen=True, kw_only=True)
class Context:
    """What the group found in its options and the environment; commands take it with `click.pass_obj`."""

    cache: Path
    debug: bool = False


class LazyGroup(click.Group):
    """A group that imports a command when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if (found := COMMANDS.get(cmd_name) or HIDDEN.get(cmd_name)) is None:
            return None
        module, attribute = found[0].split(":")
        command = getattr(importlib.import_module(module), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{found[0]} is not a command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "CALSTACK", "max_content_width": 110},
    epilog="Example: calstack run $(calstack pull smollm2-135m | tail -1) 'What is the capital of France?'",
)
@click.version_option(__version__, message="calstack %(version)s")
@click.option("--cache", type=click.Path(path_type=Path), help="Cache directory.  [default: $XDG_CACHE_HOME/calstack]", show_envvar=True)
@click.option("--debug", is_flag=True, help="Show tracebacks.", show_envvar=True)
@click.pass_context
def cli(ctx: click.Context, cache: Path | None, debug: bool) -> None:
    """Compile language models ahead of time and serve them.

    Every option can also be set by a variable: CALSTACK_CACHE, CALSTACK_SERVE_PORT and so on.

    Exit codes: 0 done, 1 failed, 2 bad input, 3 not supported, 4 device.
    """
    ctx.obj = Context(cache=(cache or default_cache()).absolute(), debug=debug)


def default_cache() -> Path:
    """Where fetched models and compiled calbins are kept, by the XDG base directory rules."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "calstack"


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. Reads `sys.argv` when `args` is None."""
    signal.signal(signal.SIGTERM, _terminate)
    arguments = list(sys.argv[1:] if args is None else args)
    debug = "--debug" in arguments or bool(os.environ.get("CALSTACK_DEBUG"))
    try:
        code = cli.main(arguments, prog_name="calstack", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter complains when it flushes
        return PIPE_CLOSED
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the outermost frame: everything must end in one line and a code
        if debug:
            traceback.print_exc()
        return _report(error)


def _terminate(_signum: int, _frame: FrameType | None) -> None:
    """SIGTERM unwinds like an exit, so that scratch directories are removed."""
    raise SystemExit(TERMINATED)


def _report(error: Exception) -> int:
    """Print `error` as one line on stderr; returns the exit code it stands for."""
    line, code = _explain(error)
    click.echo(f"calstack: {line}", err=True)
    return code


def _explain(error: Exception) -> tuple[str, int]:
    if isinstance(error, CalstackError):
        return f"error: {error.line()}", error.exit_code
    if isinstance(error, click.UsageError):
        hint = f" (see `{error.ctx.command_path} --help`)" if error.ctx else ""
        return f"error: {error.format_message()}{hint}", 2
    if isinstance(error, click.ClickException):
        return f"error: {error.format_message()}", error.exit_code
    if isinstance(error, OSError) and error.strerror:  # a full disk and the like are not bugs
        return f"error: {error.filename or 'system'}: {error.strerror}", 1
    text = " ".join(str(error).split())
    return f"internal error: {type(error).__name__}: {text} (run `calstack --debug …` for the traceback, and report it)", 1
