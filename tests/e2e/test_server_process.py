"""`calstack serve` as a process, over the fake engine: exit codes, one-line errors, signals, memory that does not grow."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.support.fake_engine import Rules
from tests.support.served import Served, served
from tests.support.tiny_model import SPECIALS, special, vocab_size, write_calbin

pytestmark = pytest.mark.e2e


def engine_options(directory: Path) -> list[str]:
    rules = Rules(specials={name: special(name) for name in SPECIALS}, vocab=vocab_size(), crash_file=str(directory / "crashed"))
    (directory / "rules.json").write_text(json.dumps(dataclasses.asdict(rules)))
    command = [sys.executable, "-m", "tests.support.fake_engine", str(directory / "rules.json")]
    return [word for part in command for word in ("--engine-command", part)]


def run_serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "calstack", "serve", *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_port_in_use_ends_in_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run_serve(str(write_calbin(tmp_path)), "--port", str(taken.getsockname()[1]))
    assert done.returncode == 2
    assert "cannot listen" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("damage", ["manifest.json", "tokenizer.json", "chat_template.jinja"])
def test_damaged_calbin_ends_in_one_line_that_names_the_file(tmp_path: Path, damage: str) -> None:
    calbin = write_calbin(tmp_path)
    (calbin / damage).write_text("{% for %}")
    done = run_serve(str(calbin), "--port", "0", *engine_options(tmp_path))
    assert done.returncode == 2
    assert damage in done.stderr
    assert "Traceback" not in done.stderr


def test_engine_that_does_not_start_ends_the_server(tmp_path: Path) -> None:
    options = ["--engine-command", sys.executable, "--engine-command", "-c", "--engine-command", "raise SystemExit(3)"]
    done = run_serve(str(write_calbin(tmp_path)), "--port", "0", "--restarts", "1", *options)
    assert done.returncode == 1
    assert "the engine process ended with code 3" in done.stderr
    assert "Traceback" not in done.stderr


def test_second_signal_ends_at_once_with_zero(tmp_path: Path) -> None:
    with (
        served(write_calbin(tmp_path), tmp_path / "log", *engine_options(tmp_path)) as server,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        hanging = pool.submit(httpx.post, f"{server.url}/v1/completions", json={"prompt": "<|hang|>x"}, timeout=30)
        while server.metric("calrt_requests_in_flight") == 0:
            time.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        assert server.process.poll() is None
        assert server.stop(signal.SIGINT, 5.0) == 0
        assert hanging.result().status_code == 503


def test_engine_process_goes_when_the_server_is_killed(tmp_path: Path) -> None:
    killed = -signal.SIGKILL
    with served(write_calbin(tmp_path), tmp_path / "log", *engine_options(tmp_path), exit_code=killed) as server:
        engine = Path(f"/proc/{server.engine_pid()}")
        server.stop(signal.SIGKILL)
        end = time.monotonic() + 5
        while engine.exists() and "Z" not in (engine / "stat").read_text().split(")")[1].split()[0]:
            assert time.monotonic() < end, "the engine process outlives its server"
            time.sleep(0.05)


def test_memory_threads_and_descriptors_do_not_grow_with_requests(tmp_path: Path) -> None:
    with served(write_calbin(tmp_path), tmp_path / "log", "--log-level", "warning", *engine_options(tmp_path)) as server:

        def batch(start: int) -> None:
            for number in range(start, start + 100):
                kind = ("", "<|error|>", "")[number % 3]
                server.http.post("/v1/completions", json={"prompt": f"{kind}unique {number}", "max_tokens": 4, "stream": number % 2 == 0})
            with pytest.raises(httpx.TimeoutException):
                server.http.post("/v1/completions", json={"prompt": "<|hang|>x"}, timeout=0.05)

        for start in range(0, 500, 100):
            batch(start)
        server.wait_idle()
        before = _footprint(server)
        for start in range(1000, 1600, 100):
            batch(start)
        server.wait_idle()
        after = _footprint(server)
    assert after[0] - before[0] < 6 * 1024, (before, after)  # KiB over 600 requests
    assert after[1:] == before[1:]


def _footprint(server: Served) -> tuple[int, int, int]:
    """Anonymous memory and swap in KiB, threads, descriptors."""
    root = Path(f"/proc/{server.process.pid}")
    status = dict(line.split(":", 1) for line in (root / "status").read_text().splitlines())
    memory = sum(int(status[name].split()[0]) for name in ("RssAnon", "VmSwap"))
    return memory, int(status["Threads"]), len(list((root / "fd").iterdir()))
