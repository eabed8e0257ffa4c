"""A served calbin as a benchmark subject: a load client on raw sockets, and the server as a child process.

The client shares the machine with the server, so it does as little as it can per event: it looks for line ends, not for JSON.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

from calstack.bench.subject import decode_window, prompt_ids
from calstack.errors import UnavailableError

__all__ = ["HttpSubject", "Served", "Stream", "stream_completion"]

_READY_TIMEOUT_S = 120.0
_REQUEST_TIMEOUT_S = 600.0


@dataclasses.dataclass(frozen=True, slots=True)
class Stream:
    """One streamed completion: the monotonic second it was sent and the arrival of each token event."""

    sent: float
    events: tuple[float, ...]

    @property
    def ttft_s(self) -> float:
        """Seconds from sending to the first token."""
        return self.events[0] - self.sent


async def stream_completion(port: int, body: dict[str, object]) -> Stream:
    """POST a streaming /v1/completions on localhost and note when each token event arrives.

    Raises:
        UnavailableError: when the answer is not a 200 stream, with its first line.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    payload = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    writer.write(head.encode() + payload)
    sent = time.perf_counter()
    try:
        status = await reader.readline()
        if b" 200 " not in status:
            raise UnavailableError(f"the server answered {status.decode(errors='replace').strip()}")
        return Stream(sent, tuple(await _token_events(reader)))
    finally:
        writer.close()


async def _token_events(reader: asyncio.StreamReader) -> list[float]:
    events = []
    while line := await reader.readline():
        if line.startswith(b"data: [DONE]"):
            break
        if line.startswith(b"data: "):
            events.append(time.perf_counter())
    return events


class Served:
    """`calstack serve` as a child on a free port of localhost; use as a context manager."""

    def __init__(self, calbin: Path, *, arguments: tuple[str, ...] = ()) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        command = [sys.executable, "-m", "calstack", "serve", str(calbin), "--port", str(self.port), *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._wait_ready()

    def _wait_ready(self) -> None:
        end = time.monotonic() + _READY_TIMEOUT_S
        while time.monotonic() < end and self.process.poll() is None:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as connection:
                    connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                    if b" 200 " in connection.recv(64):
                        return
            except OSError:
                pass
            time.sleep(0.05)
        self.close()
        raise UnavailableError("the server did not become ready", retry_after=_READY_TIMEOUT_S)

    def close(self) -> None:
        """Drain and end the server."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class HttpSubject:
    """A calbin measured by a client of its own server. Prompts differ from run to run, so no prefix is ever reused."""

    def __init__(self, calbin: Path, *, vocab: int, arguments: tuple[str, ...] = ()) -> None:
        self._server = Served(calbin, arguments=arguments)
        self._vocab = vocab
        self._salt = 0

    @property
    def name(self) -> str:
        return "calstack over HTTP"

    def prefill(self, tokens: int) -> float:
        return asyncio.run(self._streams([tokens], 1))[0].ttft_s

    def decode(self, depth: int, batch: int, steps: int) -> float:
        streams = asyncio.run(self._streams([depth] * batch, steps + (32 if batch > 1 else 1)))
        return decode_window([s.events for s in streams], steps)

    def close(self) -> None:
        self._server.close()

    async def _streams(self, prompts: list[int], tokens: int) -> list[Stream]:
        calls = []
        for count in prompts:
            self._salt += 1
            body: dict[str, object] = {
                "prompt": prompt_ids(count, self._vocab, salt=1000 * self._salt),
                "max_tokens": tokens,
                "temperature": 0,
                "stream": True,
                "ignore_eos": True,
            }
            calls.append(stream_completion(self._server.port, body))
        return list(await asyncio.wait_for(asyncio.gather(*calls), _REQUEST_TIMEOUT_S))
