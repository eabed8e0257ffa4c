"""The engine process's shell over a real socket, with the fake device on the real clock."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from calstack.clock import MonotonicClock
from calstack.engine.core import Core
from calstack.engine.driver import Driver
from calstack.engine.link import ServerLink
from calstack.engine.process import EngineProcess
from calstack.errors import DeviceFatal, UsageError
from calstack.runtime.runtime import Runtime
from calstack.specs import SamplingParams
from calstack.wire import (
    MAX_MESSAGE_BYTES,
    Cancel,
    DeviceAnswer,
    DeviceCommand,
    Drain,
    EngineFailed,
    EngineMessage,
    EngineStats,
    Ready,
    ServerMessage,
    StatsRequest,
    StepOutput,
    Stop,
    Submit,
)
from tests.support.facts import small_facts
from tests.support.fake_device import FakeDevice, alone

GREEDY = SamplingParams(temperature=0.0)


class Server:
    """The API process's end, blocking, and the engine in a thread."""

    def __init__(self, device: type[FakeDevice] = FakeDevice, dump: Callable[[str], Path | None] | None = None) -> None:
        self.sock, theirs = socket.socketpair()
        self.sock.settimeout(10)
        facts, clock = small_facts(), MonotonicClock()
        self.device = device(facts, clock, row_ns=1000, base_ns=200_000)
        runtime = Runtime(self.device, Path("none"), facts, kv_blocks=32)
        self.driver = Driver(Core(facts, kv_blocks=32), runtime)
        self.link = ServerLink(theirs)
        self.process = EngineProcess(self.driver, self.link, dump=dump)
        self.code: int | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        assert isinstance(self.receive(), Ready)

    def _run(self) -> None:
        self.code = self.process.run()

    def send(self, *messages: ServerMessage) -> None:
        for message in messages:
            body = msgspec.msgpack.encode(message)
            self.sock.sendall(struct.pack("<I", len(body)) + body)

    def receive(self) -> EngineMessage:
        (size,) = struct.unpack("<I", self._exactly(4))
        return msgspec.msgpack.decode(self._exactly(size), type=EngineMessage)

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self.sock.recv(count - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    def until_ends(self, names: set[str]) -> dict[str, tuple[list[int], str]]:
        ids: dict[str, list[int]] = {}
        ends: dict[str, tuple[list[int], str]] = {}
        while set(ends) < names:
            message = self.receive()
            if isinstance(message, StepOutput):
                for out in message.tokens:
                    ids.setdefault(out.request, []).extend(out.ids)
                    if out.finish is not None:
                        ends[out.request] = (ids[out.request], out.finish.reason)
        return ends

    def answer_to(self, command: DeviceCommand) -> DeviceAnswer:
        self.send(command)
        while not isinstance(message := self.receive(), DeviceAnswer):
            pass
        assert message.id == command.id
        return message

    def join(self) -> int | None:
        self.thread.join(10)
        assert not self.thread.is_alive()
        return self.code


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.sock.close()
    server.join()


def submit(name: str, prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 8) -> Submit:
    return Submit(request=name, prompt=prompt, max_tokens=max_tokens, sampling=GREEDY, seed=1)


def test_requests_are_served_and_launch_times_come_with_the_tokens(server: Server) -> None:
    server.send(*[submit(f"r{i}", (i, i + 1)) for i in range(5)])
    ends = server.until_ends({f"r{i}" for i in range(5)})
    assert all(ends[f"r{i}"] == (alone((i, i + 1), GREEDY, 1, 0, 8, 97), "length") for i in range(5))


def test_stats_are_given_when_asked(server: Server) -> None:
    server.send(submit("a"))
    server.until_ends({"a"})
    server.send(StatsRequest())
    stats = server.receive()
    while not isinstance(stats, EngineStats):
        stats = server.receive()
    assert stats.counters["tokens"] == 8
    assert stats.kv_blocks_total == 32
    assert (stats.lanes_used, stats.counters["leaks"]) == (0, 0)
    assert set(stats.times_s) == {"infer", "h2d", "d2h", "framework", "idle"}


def test_cancel_ends_a_running_request(server: Server) -> None:
    server.send(submit("a", max_tokens=90))
    assert isinstance(server.receive(), StepOutput)
    server.send(Cancel(request="a"))
    assert server.until_ends({"a"})["a"][1] in ("cancelled", "length")


def test_stop_ends_the_process_at_once(server: Server) -> None:
    server.send(submit("a", max_tokens=90), Stop())
    assert server.join() == 0


def test_drain_ends_the_process_after_the_last_request(server: Server) -> None:
    server.send(submit("a"), Drain(), submit("late"))
    ends = server.until_ends({"a", "late"})
    assert (ends["a"][1], ends["late"][1]) == ("length", "error")
    assert server.join() == 0


def test_the_process_ends_when_the_server_is_gone(server: Server) -> None:
    server.send(submit("a", max_tokens=90))
    server.sock.close()
    assert server.join() == 0


def test_a_lost_device_is_reported_and_gives_the_exit_code(server: Server) -> None:
    server.device.faults.append(DeviceFatal("gone", where="fake"))
    server.send(submit("a"))
    message = server.receive()
    while not isinstance(message, EngineFailed):
        message = server.receive()
    assert message.error.kind == "DeviceFatal"
    assert server.join() == 4


@pytest.mark.parametrize("data", [struct.pack("<I", MAX_MESSAGE_BYTES + 1), struct.pack("<I", 3) + b"\xff\xff\xff"])
def test_a_server_that_does_not_speak_the_protocol_ends_the_process(server: Server, data: bytes) -> None:
    server.sock.sendall(data)
    message = server.receive()
    assert isinstance(message, EngineFailed)
    assert server.join() == 1


def test_an_idle_process_uses_no_cpu(server: Server) -> None:
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.05


# --- the operations plane ------------------------------------------------------------------------------------------------------


class ControlledDevice(FakeDevice):
    """With power modes and a register."""

    mode = "high"

    def power_modes(self) -> tuple[str, ...]:
        return ("high", "low")

    def set_power_mode(self, mode: str) -> None:
        self.mode = mode

    def read_register(self, name: str) -> int:
        if name != "temperature":
            raise UsageError("there is no such register", where=name)
        return 41


@pytest.fixture
def controlled(tmp_path: Path) -> Iterator[Server]:
    server = Server(ControlledDevice, lambda reason: tmp_path / f"{reason}.json")
    yield server
    server.sock.close()
    server.join()


def test_status_gives_memory_by_chip(server: Server) -> None:
    answer = server.answer_to(DeviceCommand(id=3, action="status"))
    assert (answer.error, answer.status, answer.device) == (None, "ready", server.device.info().name)
    assert [chip.total_bytes for chip in answer.chips] == [chip.total_bytes for chip in server.device.memory()]


def test_requests_go_on_with_their_tokens_after_an_operators_reset(server: Server) -> None:
    names = {f"r{i}" for i in range(6)}
    server.send(*[submit(f"r{i}", (i, i + 1), max_tokens=40) for i in range(6)])
    first = server.receive()
    assert isinstance(first, StepOutput)
    server.send(DeviceCommand(id=1, action="reset"), DeviceCommand(id=2, action="reset"))
    ids: dict[str, list[int]] = {}
    ended: set[str] = set()
    answers: list[DeviceAnswer] = []
    message: EngineMessage = first
    while ended < names or len(answers) < 2:
        if isinstance(message, DeviceAnswer):
            answers.append(message)
        for out in message.tokens if isinstance(message, StepOutput) else ():
            ids.setdefault(out.request, []).extend(out.ids)
            if out.finish is not None:
                assert out.finish.reason == "length"
                ended.add(out.request)
        if ended < names or len(answers) < 2:
            message = server.receive()
    assert ids == {f"r{i}": alone((i, i + 1), GREEDY, 1, 0, 40, 97) for i in range(6)}
    assert [answer.error for answer in answers] == [None, None]
    assert server.driver.core.counters["resets"] == 2


def test_more_resets_in_a_row_than_a_failing_device_gets_are_an_operators_right(server: Server) -> None:
    for number in range(10):
        assert server.answer_to(DeviceCommand(id=number, action="reset")).error is None
    server.send(submit("a"))
    assert server.until_ends({"a"})["a"][1] == "length"


def test_power_mode_and_register_reach_a_device_that_has_them(controlled: Server) -> None:
    assert controlled.answer_to(DeviceCommand(id=1, action="power", value="low")).text == "low"
    assert isinstance(controlled.device, ControlledDevice)
    assert controlled.device.mode == "low"
    assert controlled.answer_to(DeviceCommand(id=2, action="register", value="temperature")).text == "41"
    for command in (DeviceCommand(id=3, action="power", value="max"), DeviceCommand(id=4, action="register", value="clock")):
        error = controlled.answer_to(command).error
        assert error is not None
        assert error.kind == "RequestError"


@pytest.mark.parametrize("action", ["power", "register", "dump"])
def test_what_is_not_there_is_unsupported_not_done(server: Server, action: Literal["power", "register", "dump"]) -> None:
    error = server.answer_to(DeviceCommand(id=1, action=action, value="x")).error
    assert error is not None
    assert error.kind == "UnsupportedError"


def test_dump_answers_with_its_path(controlled: Server, tmp_path: Path) -> None:
    assert controlled.answer_to(DeviceCommand(id=1, action="dump")).text == str(tmp_path / "on demand.json")
