"""Processor time that serving costs for each streamed token, and what it adds to the time to first token.

    python tools/serving_cost.py m.calbin [--streams 16] [--tokens 400] [--step-us 5910]

The null device computes nothing; its launches take the time that the cpu device's take at this batch (--step-us). Counted is the processor
time of the API process and of all engine threads, read from the kernel's scheduler statistics. Not counted: what is spent inside the
device's methods (launches), and the client, which is this process.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import mmap
import os
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

BUDGET_MS, BUDGET_TTFT_MS = 0.1, 5.0
_METHODS = ("submit", "wait", "poll", "give_mask", "cancel", "memory", "status")


def engine(arguments: list[str]) -> int:
    """The engine process over the null device, whose own time goes to a counter in a shared file."""
    from calstack.devices.base import OpenOptions
    from calstack.devices.null import NullDevice
    from calstack.engine.options import EngineOptions
    from calstack.engine.start import run_engine

    parser = argparse.ArgumentParser()
    parser.add_argument("--as-engine", nargs=2, metavar=("STEP_US", "COUNTER"))
    parser.add_argument("calbin", type=Path)
    parser.add_argument("--connect", type=Path)
    options, _ = parser.parse_known_args(arguments)
    step_us, counter = options.as_engine
    with Path(counter).open("r+b") as file:
        shared = mmap.mmap(file.fileno(), 16)
    for name in _METHODS:
        setattr(NullDevice, name, _timed(getattr(NullDevice, name), shared))
    opened = OpenOptions(extra=(("launch_us", step_us),))
    return run_engine(options.calbin, options.connect, device="null", open_options=opened, options=EngineOptions())


def _timed(method: Callable[..., Any], shared: mmap.mmap) -> Callable[..., Any]:
    depth = total = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal depth, total
        depth += 1
        began = time.thread_time_ns()
        try:
            return method(*args, **kwargs)
        finally:
            depth -= 1
            if not depth:
                total += time.thread_time_ns() - began
                struct.pack_into("<Q", shared, 0, total)

    return call


@dataclasses.dataclass(frozen=True)
class Times:
    """Processor time so far, ns."""

    api: int
    engine: int
    launches: int

    def since(self, before: Times) -> Times:
        """What was spent after `before`."""
        return Times(self.api - before.api, self.engine - before.engine, self.launches - before.launches)


class Server:
    """`calstack serve` with the engine above."""

    def __init__(self, calbin: Path, step_us: int, directory: Path) -> None:
        self._counter = directory / "counter"
        self._counter.write_bytes(bytes(16))
        command = [sys.executable, str(Path(__file__).resolve()), "--as-engine", str(step_us), str(self._counter)]
        words = [sys.executable, "-m", "calstack", "serve", str(calbin), "--port", "0", "--no-ops-enabled", "--log-level", "warning"]
        self.process = subprocess.Popen(
            [*words, *(word for part in command for word in ("--engine-command", part))], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if " at http://" not in line:
            raise SystemExit("the server did not start")
        where = urlsplit(line.split(" at ")[1].split()[0])
        self.address = (where.hostname or "", where.port or 0)
        self._engine = int(Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()[0])

    def times(self) -> Times:
        """Processor time so far."""
        launches = struct.unpack_from("<Q", self._counter.read_bytes())[0]
        return Times(_spent(self.process.pid), _spent(self._engine), launches)

    def stop(self) -> None:
        """End it."""
        self.process.terminate()
        self.process.wait(20)


def _spent(pid: int) -> int:
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir())


def ask(address: tuple[str, int], prompt: str, tokens: int) -> socket.socket:
    """Send one streaming chat request."""
    message = {"role": "user", "content": prompt}
    body = json.dumps({"messages": [message], "max_tokens": tokens, "ignore_eos": True, "stream": True, "cache_prompt": False}).encode()
    sock = socket.create_connection(address, timeout=60)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    sock.sendall(head.encode() + body)
    return sock


def read_all(sock: socket.socket) -> int:
    """Read a stream to its end; gives the events it had."""
    events, tail = 0, b""
    while not tail.endswith(b"0\r\n\r\n"):
        data = sock.recv(1 << 16)
        if not data:
            raise SystemExit("the stream was cut")
        events, tail = events + data.count(b"data: "), (tail + data)[-8:]
    sock.close()
    return events


def stream_cost(server: Server, streams: int, tokens: int) -> tuple[Times, int]:
    """Processor time of so many streams side by side, and the events they had."""
    before = server.times()
    socks = [ask(server.address, f"stream number {number}", tokens) for number in range(streams)]
    events = sum(map(read_all, socks))
    return server.times().since(before), events


def first_token_ms(server: Server, rounds: int, step_us: int) -> float:
    """Median time to the first byte of an answer beyond the device's own launch, ms, on an idle server."""
    found = []
    for number in range(rounds):
        began = time.perf_counter()
        sock = ask(server.address, f"a question of some words that nobody has asked before, number {number}", 2)
        head = sock.recv(1 << 16)
        found.append((time.perf_counter() - began) * 1e3 - step_us / 1e3)
        if not head.startswith(b"HTTP/1.1 200"):
            raise SystemExit(head.decode(errors="replace"))
        if b"0\r\n\r\n" not in head[-8:]:
            read_all(sock)
        time.sleep(0.01)
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("calbin", type=Path)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=400, help="of each stream")
    parser.add_argument("--step-us", type=int, default=5910, help="time of a launch: the cpu device's at this batch")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a budget is missed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        server = Server(options.calbin, options.step_us, Path(directory))
        try:
            stream_cost(server, options.streams, 50)  # warm-up
            ttft = first_token_ms(server, 30, options.step_us)
            spent, events = stream_cost(server, options.streams, options.tokens)
        finally:
            server.stop()
    count = options.streams * options.tokens
    serving = spent.api + spent.engine - spent.launches
    per = {"api": spent.api, "engine": spent.engine - spent.launches, "serving": serving, "launches": spent.launches}
    print(f"{options.streams} streams, {count} tokens in {events} events, launches of {options.step_us} us")
    for name, ns in per.items():
        print(f"{name:9} {ns / count / 1e6:.4f} ms of processor time per token")
    print(f"time to first token beyond the launch: {ttft:.2f} ms")
    if options.check and (serving / count / 1e6 > BUDGET_MS or ttft > BUDGET_TTFT_MS):
        raise SystemExit(1)


if __name__ == "__main__":
    if "--as-engine" in sys.argv:
        sys.exit(engine(sys.argv[1:]))
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
