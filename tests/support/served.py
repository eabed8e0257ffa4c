"""`calstack serve` as a user runs it: a process of its own with its engine process, on a free port."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai

START_TIMEOUT_S = 60


class Served:
    def __init__(self, process: subprocess.Popen[str], url: str, curl: str, start_s: float) -> None:
        self.process, self.url, self.curl, self.start_s = process, url, curl, start_s
        self.http = httpx.Client(base_url=url, timeout=60)
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)

    def metric(self, name: str) -> float:
        """Value of an unlabelled metric."""
        lines = self.http.get("/metrics").text.splitlines()
        return float(next(line.split()[1] for line in lines if line.startswith(f"{name} ")))

    def idle(self) -> bool:
        return all(self.metric(name) == 0 for name in ("calrt_requests_in_flight", "calrt_kv_used_batches", "calrt_running_requests"))

    def wait_idle(self, seconds: float = 10.0) -> None:
        end = time.monotonic() + seconds
        while not self.idle():
            assert time.monotonic() < end, self.http.get("/metrics").text
            time.sleep(0.05)

    def complete(self, prompt: str, **more: Any) -> str:
        response = self.http.post("/v1/completions", json={"prompt": prompt, "temperature": 0, "max_tokens": 24, **more})
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["text"])

    def engine_pid(self) -> int:
        """The one child of the API process."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        assert len(children) == 1, children
        return int(children[0])

    def pids(self) -> list[int]:
        return [self.process.pid, self.engine_pid()]

    def stop(self, number: int = signal.SIGTERM, timeout: float = 20.0) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout)


@contextlib.contextmanager
def served(calbin: Path, log: Path, *options: str, exit_code: int = 0) -> Iterator[Served]:
    """Start on a free port, yield when ready, end and check the exit code."""
    command = [sys.executable, "-m", "calstack", "serve", str(calbin), "--port", "0", *options]
    began = time.monotonic()
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert process.stdout is not None
        line, curl = process.stdout.readline(), process.stdout.readline()
        assert " at http://" in line, log.read_text()
        server = Served(process, line.split(" at ")[1].split()[0], curl, time.monotonic() - began)
        try:
            yield server
        finally:
            server.http.close()
            server.openai.close()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        assert process.wait(20) == exit_code, log.read_text()
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
