"""Where `calstack serve` takes its settings from, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from calstack.cli.app import cli
from calstack.cli.settings import leaves, reference_page
from calstack.errors import UsageError
from calstack.server import main as server_main
from calstack.server.config import ServeConfig


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> list[ServeConfig]:
    """The configurations that the server was started with."""
    seen: list[ServeConfig] = []
    monkeypatch.setattr(server_main, "serve", lambda config, notify: seen.append(config))
    return seen


def run(*arguments: str, **variables: str) -> None:
    result = CliRunner().invoke(cli, ["serve", *arguments], env=variables, catch_exceptions=False, standalone_mode=False)
    assert result.exit_code == 0, result.output


def written(directory: Path, text: str) -> str:
    path = directory / "serve.toml"
    path.write_text(text)
    return str(path)


def test_option_comes_before_variable_before_file_before_default(tmp_path: Path, configured: list[ServeConfig]) -> None:
    file = written(tmp_path, 'calbin = "f.calbin"\ngrace_s = 7\n[listen]\nport = 1\nhost = "::1"\n[engine]\nthreads = 3\n')
    run("--config", file, "--port", "3", CALSTACK_SERVE_PORT="2", CALSTACK_SERVE_HOST="h")
    run("m.calbin", CALSTACK_SERVE_CONFIG=file, CALSTACK_SERVE_PORT="2")
    first, second = configured
    assert (first.calbin, first.grace_s, first.engine.threads) == (Path("f.calbin"), 7.0, 3)
    assert (first.listen.port, first.listen.host) == (3, "h")
    assert (second.listen.port, second.listen.host, second.calbin) == (2, "::1", Path("m.calbin"))
    assert first.limits == ServeConfig(calbin=Path()).limits


def test_file_holds_lists_sizes_paths_and_choices(tmp_path: Path, configured: list[ServeConfig]) -> None:
    text = 'runtime_dir = "/run/x"\n[engine]\nkv_memory = "2GiB"\ncommand = ["a", "b"]\n'
    text += '[limits]\nmax_body_bytes = 10\n[log]\nlevel = "debug"\n'
    run("m.calbin", "--config", written(tmp_path, text))
    config = configured[0]
    assert (config.runtime_dir, config.engine.kv_memory, config.engine.command) == (Path("/run/x"), 2 << 30, ("a", "b"))
    assert (config.limits.max_body_bytes, config.log.level) == (10, "debug")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[listen]\nprot = 1\n", r"listen\.prot: is not a setting \(did you mean listen\.port\?\)"),
        ("port = 1\n", r"port: is not a setting \(did you mean listen\.port\?\)"),
        ("[lisen]\nport = 1\n", r"lisen: is not a setting \(did you mean listen\?\)"),
        ("zzzzzz = 1\n", "is not a setting"),
        ("listen = 3\n", "is a section"),
        ('[listen]\nport = "1"\n', "must be a whole number"),
        ("[listen]\nport = true\n", "must be a whole number"),
        ("[listen]\nport = 1.5\n", "must be a whole number"),
        ("grace_s = '1'\n", "must be a number"),
        ("[engine]\ncommand = 'x'\n", "must be a list of texts"),
        ("[engine]\nkv_memory = 1.5\n", "512M"),
        ("[log]\nlevel = 'loud'\n", "one of debug, info"),
        ("model = 3\n", "must be a text"),
        ("= 3\n", "cannot be read"),
        ("[listen]\nport = 70000\n", r"listen\.port: is out of range"),
        ("grace_s = -1\n", "grace_s: is out of range"),
        ("grace_s = nan\n", "grace_s: is out of range"),
        ("[limits]\nmax_choices = 0\n", r"limits\.max_choices: is out of range"),
    ],
)
def test_file_that_says_something_else_is_refused_by_name(tmp_path: Path, configured: list[ServeConfig], text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run("m.calbin", "--config", written(tmp_path, text))
    assert not configured


def test_missing_and_binary_files_are_refused(tmp_path: Path, configured: list[ServeConfig]) -> None:
    (tmp_path / "b").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "none", tmp_path / "b", tmp_path):
        with pytest.raises(UsageError, match="cannot be read"):
            run("m.calbin", "--config", str(path))
    assert not configured


def test_unknown_variable_is_refused_with_the_nearest_name(configured: list[ServeConfig]) -> None:
    with pytest.raises(UsageError, match=r"CALSTACK_SERVE_PROT: is not a setting .*CALSTACK_SERVE_PORT"):
        run("m.calbin", CALSTACK_SERVE_PROT="1")
    assert not configured


def test_reference_page_names_every_setting_with_option_and_variable() -> None:
    page = reference_page(ServeConfig, "CALSTACK_SERVE_", "t", "i")
    for leaf in leaves(ServeConfig):
        assert f"| `{leaf.path.rpartition('.')[2]}` | `{leaf.option}` | `CALSTACK_SERVE_{leaf.parameter.upper()}` |" in page
