"""`calstack engine` as its own process, spoken to as the API process does."""

from __future__ import annotations

import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from calstack.specs import SamplingParams
from calstack.wire import EngineFailed, EngineMessage, Ready, ServerMessage, StepOutput, Submit
from tests.support.tiny_calbin import Tiny, write_tiny

pytestmark = pytest.mark.e2e
GREEDY = SamplingParams(temperature=0.0)


class Process:
    """An engine process and the socket it connected to."""

    def __init__(self, directory: Path, calbin: Path, *options: str) -> None:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(directory / "engine.sock"))
        listener.listen(1)
        listener.settimeout(30)
        command = [sys.executable, "-m", "calstack", "engine", str(calbin), "--connect", str(directory / "engine.sock"), *options]
        self.process = subprocess.Popen(command)
        self.sock, _ = listener.accept()
        self.sock.settimeout(30)
        listener.close()

    def send(self, message: ServerMessage) -> None:
        body = msgspec.msgpack.encode(message)
        self.sock.sendall(struct.pack("<I", len(body)) + body)

    def receive(self) -> EngineMessage:
        (size,) = struct.unpack("<I", self.sock.recv(4, socket.MSG_WAITALL))
        return msgspec.msgpack.decode(self.sock.recv(size, socket.MSG_WAITALL), type=EngineMessage)

    def finish_of(self, request: str) -> tuple[int, str]:
        """How many ids came, and how it ended."""
        count = 0
        while True:
            message = self.receive()
            for out in message.tokens if isinstance(message, StepOutput) else ():
                count += len(out.ids)
                if out.request == request and out.finish is not None:
                    return count, out.finish.reason

    def close(self) -> None:
        self.sock.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)


@pytest.fixture
def calbin(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "tiny.calbin", Tiny(context=512, prefill_rows=64))


@pytest.fixture(params=["null", pytest.param("cpu", marks=pytest.mark.native)])
def engine(request: pytest.FixtureRequest, tmp_path: Path, calbin: Path) -> Iterator[Process]:
    process = Process(tmp_path, calbin, "--device", request.param)
    yield process
    process.close()


def submit(max_tokens: int) -> Submit:
    return Submit(request="a", prompt=(1, 2, 3), max_tokens=max_tokens, sampling=GREEDY, seed=1)


def test_the_process_serves_and_drains_on_sigterm(engine: Process) -> None:
    ready = engine.receive()
    assert isinstance(ready, Ready)
    assert ready.info.context == 512
    engine.send(submit(400))
    assert isinstance(engine.receive(), StepOutput)
    engine.process.send_signal(signal.SIGTERM)
    assert engine.finish_of("a")[1] == "length"
    assert engine.process.wait(10) == 0


def test_the_process_ends_with_the_server(engine: Process) -> None:
    assert isinstance(engine.receive(), Ready)
    engine.sock.close()
    assert engine.process.wait(10) == 0


def test_an_interrupt_of_the_terminal_is_left_to_the_server(engine: Process) -> None:
    assert isinstance(engine.receive(), Ready)
    engine.process.send_signal(signal.SIGINT)
    engine.send(submit(20))
    assert engine.finish_of("a") == (20, "length")


def test_a_damaged_calbin_is_reported_and_gives_code_2(tmp_path: Path, calbin: Path) -> None:
    (calbin / "manifest.json").write_text("{}")
    process = Process(tmp_path, calbin, "--device", "null")
    try:
        message = process.receive()
        assert isinstance(message, EngineFailed)
        assert message.error.kind == "ArtifactError"
        assert process.process.wait(10) == 2
    finally:
        process.close()
