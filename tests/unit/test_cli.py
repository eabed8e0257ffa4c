"""The command line as scripts see it: lines, exit codes, start-up time."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

from calstack.cli import app, main
from calstack.errors import ArtifactError, DeviceFatal, UnsupportedError


def calstack(*arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "calstack", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.mark.parametrize("name", app.COMMANDS)
def test_every_command_has_help_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"Example: calstack {name} " in shown


def test_group_help_lists_commands_and_exit_codes_but_no_internal_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {name}" in shown for name in app.COMMANDS)
    assert "Exit codes" in shown
    assert "\n  engine" not in shown


def test_help_loads_no_heavy_library() -> None:
    probe = (
        "import sys; from calstack.cli import main; main(['--help'])\n"
        "heavy = {'numpy', 'rich', 'msgspec', 'onnx', 'tokenizers', 'starlette', 'uvicorn', 'jinja2'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["frob"], "No such command"),
        (["serve"], "no calbin is given"),
        (["pull", "no-such-model"], "no such demo model"),
        (["compile", "/does/not/exist.gguf", "-o", "/tmp/never.calbin"], "no such file"),
        (["compile", "x.gguf", "-o", "/tmp/never.calbin", "--batch", "0,4"], "at least 1"),
        (["compile", "x.gguf", "-o", "/tmp/never.calbin", "--quant", "w5a5"], "w5a5"),
        (["inspect", "/does/not/exist"], "manifest.json"),
        (["serve", "x.calbin", "--kv-memory", "lots"], "512M"),
    ],
)
def test_bad_input_ends_in_one_line_and_code_2(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("calstack: error: ")
    assert shown.err.count("\n") == 1
    assert words in shown.err


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ArtifactError("is damaged", where="m.calbin"), 2, "calstack: error: m.calbin: is damaged\n"),
        (UnsupportedError("has an operator nobody knows"), 3, "calstack: error: has an operator nobody knows\n"),
        (DeviceFatal("is gone", where="cpu"), 4, "calstack: error: cpu: is gone\n"),
        (OSError(errno.ENOSPC, "No space left on device", "/full"), 1, "calstack: error: /full: No space left on device\n"),
        (KeyboardInterrupt(), 130, "\n"),
    ],
)
def test_errors_become_lines_and_codes(
    error: BaseException, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _command_that_raises(error, monkeypatch)
    assert main(["raise"]) == code
    assert capsys.readouterr().err == line


def test_our_own_bug_shows_its_traceback_only_with_debug(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _command_that_raises(ZeroDivisionError("by\nzero"), monkeypatch)
    assert main(["raise"]) == 1
    plain = capsys.readouterr().err
    assert plain.startswith("calstack: internal error: ZeroDivisionError: by zero (")
    assert plain.count("\n") == 1
    assert main(["--debug", "raise"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_closed_pipe_is_quiet() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "calstack", "--help"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (app.PIPE_CLOSED, "")


def test_sigterm_unwinds_with_143(tmp_path: Path) -> None:
    script = (
        "import sys, time, click\n"
        "from calstack.cli import app\n"
        "@click.command('hang')\n"
        "def hang():\n"
        "    try:\n"
        "        print('started', flush=True); time.sleep(60)\n"
        f"    finally:\n        open({str(tmp_path / 'cleaned')!r}, 'w').close()\n"
        "sys.modules['hang_module'] = type(sys)('hang_module'); sys.modules['hang_module'].hang = hang\n"
        "app.COMMANDS['hang'] = ('hang_module:hang', '')\n"
        "sys.exit(app.main(['hang']))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == app.TERMINATED
    assert (tmp_path / "cleaned").exists()


def test_variables_set_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Path] = []

    @click.command()
    @click.pass_obj
    def show(obj: app.Context, /) -> None:
        seen.append(obj.cache)

    monkeypatch.setitem(app.COMMANDS, "show", ("calstack.cli.app:show", ""))
    monkeypatch.setattr(app, "show", show, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["show"]) == 0
    monkeypatch.setenv("CALSTACK_CACHE", str(tmp_path / "mine"))
    assert main(["show"]) == 0
    assert main(["--cache", "/other", "show"]) == 0
    assert seen == [tmp_path / "calstack", tmp_path / "mine", Path("/other")]


def test_relative_xdg_cache_home_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/place")
    assert app.default_cache() == Path.home() / ".cache" / "calstack"


@pytest.mark.slow
def test_help_starts_within_a_tenth_of_a_second() -> None:
    times = []
    for _ in range(5):
        start = time.monotonic()
        assert calstack("--help").returncode == 0
        times.append(time.monotonic() - start)
    assert min(times) < 0.1


def _command_that_raises(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def fail() -> None:
        raise error

    monkeypatch.setitem(app.COMMANDS, "raise", ("calstack.cli.app:fail", ""))
    monkeypatch.setattr(app, "fail", fail, raising=False)
