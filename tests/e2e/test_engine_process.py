"""`calstack engine` as its own process, spoken to as the API process does."""

from __future__ import annotations

import signal
import socket
import struct
import subprocess
import sys
import time
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

    def ids_until_death(self) -> list[int]:
        """Ids of all tokens until the connection breaks."""
        ids: list[int] = []
        while True:
            try:
                message = self.receive()
            except (struct.error, msgspec.MsgspecError, ConnectionError):
                return ids
            ids.extend(token for out in (message.tokens if isinstance(message, StepOutput) else ()) for token in out.ids)

    def ids_of(self, request: str) -> list[int]:
        """Ids of a request until its end."""
        ids: list[int] = []
        while True:
            message = self.receive()
            for out in message.tokens if isinstance(message, StepOutput) else ():
                if out.request == request:
                    ids.extend(out.ids)
                    if out.finish is not None:
                        return ids

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


def submit(max_tokens: int, output: tuple[int, ...] = ()) -> Submit:
    return Submit(request="a", prompt=(1, 2, 3), output=output, max_tokens=max_tokens, sampling=GREEDY, seed=1)


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


@pytest.mark.parametrize(("fault", "code", "most_s"), [("hang", 4, 5.0), ("crash", 86, 2.0), ("fatal", 4, 2.0)])
@pytest.mark.parametrize("inner", ["null", pytest.param("cpu", marks=pytest.mark.native)])
def test_a_lost_device_ends_the_process_and_the_next_one_goes_on_with_the_same_ids(
    tmp_path: Path, calbin: Path, inner: str, fault: str, code: int, most_s: float
) -> None:
    ids: list[int] = []
    for name, device in (("whole", inner), ("broken", f"faults:{inner}?at=30:{fault}"), ("next", inner)):
        (tmp_path / name).mkdir()
        process = Process(tmp_path / name, calbin, "--device", device)
        assert isinstance(process.receive(), Ready)
        process.send(submit(60, tuple(ids) if name == "next" else ()))
        if name == "broken":
            begin = time.monotonic()
            ids = process.ids_until_death()
            assert process.process.wait(10) == code
            assert time.monotonic() - begin < most_s
            assert 20 < len(ids) < 60
        elif name == "whole":
            whole = process.ids_of("a")
        else:
            assert ids + process.ids_of("a") == whole
        process.close()
