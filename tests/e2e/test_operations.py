"""The operations plane of a real server on the cpu device, with `calstack ops` and `calstack audit` as an operator types them."""

from __future__ import annotations

import concurrent.futures
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.served import Served, served

pytestmark = [pytest.mark.e2e, pytest.mark.native]

TEXT = "Once upon a time"


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ops-") as found:  # pytest's own are too long for a socket
        yield Path(found)


@pytest.fixture(scope="module")
def server(smollm2_calbin: Path, home: Path) -> Iterator[Served]:
    file = home / "serve.toml"
    file.write_text(
        f'calbin = "{smollm2_calbin}"\nruntime_dir = "{home}/run"\n[engine]\ndump_dir = "{home}/dumps"\n'
        f'[ops]\naudit_file = "{home}/audit.jsonl"\n[listen]\nport = 1\n'
    )
    with served(smollm2_calbin, home / "log", "--config", str(file)) as running:
        yield running


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "calstack", *arguments], capture_output=True, text=True, timeout=60, check=False)


def ops(home: Path, *arguments: str) -> Any:
    done = run("ops", "--socket", f"{home}/run/ops.sock", *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_status_shows_the_cpu_device_and_its_memory(server: Served, home: Path) -> None:
    status = ops(home, "status")
    assert status["device"]["name"] == "cpu"
    assert status["device"]["chips"][0]["parameter_bytes"] > 1 << 20


def test_reset_under_load_changes_no_token(server: Served, home: Path) -> None:
    expected = server.complete(TEXT, max_tokens=200, ignore_eos=True)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.complete, TEXT, max_tokens=200, ignore_eos=True)
        while server.metric("calrt_running_requests") == 0:
            time.sleep(0.01)
        assert ops(home, "reset")["status"] in {"ready", "busy"}
        assert running.result() == expected
    events = [
        line for line in server.http.get("/metrics").text.splitlines() if line.startswith('calrt_engine_events_total{event="resets"}')
    ]
    assert events[0].endswith(" 1.0")


def test_dump_can_be_replayed(server: Served, home: Path) -> None:
    server.complete(TEXT)
    path = Path(ops(home, "dump")["path"])
    assert path.parent == home / "dumps"
    assert path.stat().st_mode & 0o777 == 0o600
    done = run("replay", str(path))
    assert done.returncode == 0, done.stderr
    assert " 0 differ" in done.stdout


@pytest.mark.parametrize(("words", "text"), [(("power", "low"), "neither power modes nor"), (("register", "x"), "may not be read")])
def test_refusal_is_one_line(server: Served, home: Path, words: tuple[str, ...], text: str) -> None:
    done = run("ops", "--socket", f"{home}/run/ops.sock", *words)
    assert (done.returncode, done.stdout) == (1, "")
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_drain_and_resume(server: Served, home: Path) -> None:
    assert ops(home, "drain") == {"draining": True, "in_flight": 0}
    assert server.http.get("/health").status_code == 503
    assert ops(home, "resume") == {"draining": False}
    assert server.http.get("/health").status_code == 200


def test_audit_log_is_verified_and_tampering_is_found(server: Served, home: Path, tmp_path: Path) -> None:
    ops(home, "log-level", "debug")
    done = run("audit", "verify", f"{home}/audit.jsonl")
    assert done.returncode == 0, done.stderr
    count, head = int(done.stdout.split()[0]), done.stdout.split()[-1]
    assert ops(home, "status")["audit"] == {"records": count, "head": head}
    forged = tmp_path / "audit.jsonl"
    forged.write_text((home / "audit.jsonl").read_text().replace("/log-level", "/nothing-at", 1))
    done = run("audit", "verify", str(forged))
    assert done.returncode == 2
    assert f"{forged}:" in done.stderr


def test_nobody_there_is_one_line(home: Path) -> None:
    done = run("ops", "--socket", str(home / "none.sock"), "status")
    assert done.returncode == 1
    assert "does not answer" in done.stderr
    assert run("ops", "status").returncode == 2
