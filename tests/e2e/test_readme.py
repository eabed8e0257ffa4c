"""Every command block of README.md and the guides runs, in order, as a reader would type it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", pytest.param("docs/guides/getting-started.md", marks=pytest.mark.slow))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
KNOWN = {"sh", "python", "text", "json"}
READY_TIMEOUT_S = 240
# Blocks that are not run as they are: whole-suite runs would recurse, and installing belongs to a bare machine.
DRY = re.compile(r"^(make (?:test\S*|check|setup|bench|gen|native)|apt-get .*|git clone .*)(\s.*)?$", re.MULTILINE)

pytestmark = [pytest.mark.e2e, pytest.mark.native]


def blocks(page: str) -> list[tuple[str, str]]:
    return [(match[1], match[2]) for match in BLOCK.finditer((ROOT / page).read_text("utf-8"))]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def port(smollm2_calbin: Path) -> Iterator[int]:
    """`make serve` on a free port, healthy; ended by SIGTERM to its process group as a terminal would."""
    number = free_port()
    environment = {**os.environ, "PORT": str(number)}
    log = ROOT / "build" / "test_readme_serve.log"
    with log.open("wb") as out:
        server = subprocess.Popen(["make", "serve"], cwd=ROOT, env=environment, stdout=out, stderr=out, start_new_session=True)
        try:
            _wait_healthy(server, number, log)
            yield number
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGTERM)
            server.wait(30)


def _wait_healthy(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        assert server.poll() is None, f"make serve ended: {log.read_text()[-2000:]}"
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            if answer.status == 200:
                return
        time.sleep(0.2)
    pytest.fail(f"not healthy after {READY_TIMEOUT_S} s: {log.read_text()[-2000:]}")


def test_readme_names_its_two_commands_before_line_25() -> None:
    head = "\n".join((ROOT / "README.md").read_text("utf-8").splitlines()[:24])
    assert "make serve" in head
    assert "make test" in head


@pytest.mark.parametrize("page", PAGES)
def test_every_block_says_its_language(page: str) -> None:
    fences = re.findall(r"^```(\w*)$", (ROOT / page).read_text("utf-8"), re.MULTILINE)
    assert set(fences[::2]) <= KNOWN


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", PAGES)
def test_command_blocks_run_in_order(page: str, port: int, tmp_path: Path) -> None:
    for language, text in blocks(page):
        if language == "sh":
            _run(["bash", "-euo", "pipefail", "-c", _as_run(text, port, tmp_path)], text)
        elif language == "python":
            shown = _run([sys.executable, "-c", text.replace("127.0.0.1:8080", f"127.0.0.1:{port}")], text)
            assert shown.strip(), f"printed nothing: {text}"


def test_readme_shows_the_answer_the_model_gives(smollm2_calbin: Path) -> None:
    found = blocks("README.md")
    command = next(index for index, (_, text) in enumerate(found) if "calstack run" in text)
    shown = _run(["bash", "-euo", "pipefail", "-c", found[command][1]], found[command][1])
    assert shown.splitlines()[0] == found[command + 1][1].splitlines()[0]


def _as_run(text: str, port: int, scratch: Path) -> str:
    """The block with this test's port and scratch directory; `make serve` runs already, see `port`."""
    text = re.sub(r"^make serve\b.*$", "true", text, flags=re.MULTILINE)
    text = DRY.sub(lambda m: f"make -n {m[1].split()[1]} >/dev/null" if m[1].startswith("make") else "true", text)
    return text.replace("127.0.0.1:8080", f"127.0.0.1:{port}").replace("/tmp/", f"{scratch}/")


def _run(command: list[str], text: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, f"{text}\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}"
    return done.stdout
