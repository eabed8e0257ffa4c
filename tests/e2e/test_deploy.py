"""deploy/ and the guide for operators: settings are read, commands run as they are written, the service file is valid."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from calstack.cli.settings import read_file
from calstack.server.config import ServeConfig
from tests.support.served import served

ROOT = Path(__file__).resolve().parents[2]
SERVICE = ROOT / "deploy" / "systemd" / "calstack.service"

pytestmark = pytest.mark.e2e


@pytest.fixture
def home(smollm2_calbin: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ops-") as found:  # pytest's own are too long for a socket
        (Path(found) / "smollm2.calbin").symlink_to(smollm2_calbin)
        yield Path(found)


@pytest.mark.native
def test_commands_of_the_guide_run_in_order(home: Path) -> None:
    page = (ROOT / "docs" / "guides" / "operating.md").read_text("utf-8")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    script = "set -euo pipefail\n" + "".join(re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    script = script.replace("8090", str(port))
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], cwd=home, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"finish_reason":"length"' in done.stdout
    assert " 0 differ" in done.stdout
    assert "CALSTACK_SERVE_PORT" in done.stderr


def test_settings_of_the_service_are_known() -> None:
    path = ROOT / "deploy" / "systemd" / "serve.toml"
    assert read_file(path, ServeConfig, also=("calbin",))["grace_s"] == tomllib.loads(path.read_text())["grace_s"]


def test_service_waits_longer_than_the_server_and_speaks_to_it_alone() -> None:
    lines = dict(line.split("=", 1) for line in SERVICE.read_text().splitlines() if "=" in line and not line.startswith("#"))
    grace = tomllib.loads((ROOT / "deploy" / "systemd" / "serve.toml").read_text())["grace_s"]
    assert float(lines["TimeoutStopSec"]) > grace + ServeConfig(calbin=Path()).engine.stop_timeout_s
    assert (lines["Type"], lines["KillMode"]) == ("notify", "mixed")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_service_file_is_valid(tmp_path: Path) -> None:
    text = SERVICE.read_text().replace("/opt/calstack/bin/calstack", sys.executable)
    copy = tmp_path / "calstack.service"
    copy.write_text(text)
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=60, check=False)
    assert "calstack.service:" not in done.stderr, done.stderr


@pytest.mark.native
@pytest.mark.parametrize("abstract", [False, True])
def test_service_manager_is_told_when_ready_and_when_stopping(smollm2_calbin: Path, tmp_path: Path, abstract: bool) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, tempfile.TemporaryDirectory(prefix="sd-") as found:
        name = f"@calstack-test-{os.getpid()}" if abstract else f"{found}/notify"
        manager.bind(name.replace("@", "\0", 1))
        manager.settimeout(30)
        os.environ["NOTIFY_SOCKET"] = name
        try:
            with served(smollm2_calbin, tmp_path / "log"):
                assert manager.recv(100) == b"READY=1"
        finally:
            del os.environ["NOTIFY_SOCKET"]
        assert manager.recv(100) == b"STOPPING=1"
