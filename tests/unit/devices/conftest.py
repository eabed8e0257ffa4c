"""Devices under test: the same small calbin on each, once fast and once with launches that take about 100 ms."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from calstack.devices.base import Completion, Device, LaneInput, Launch, OpenOptions
from calstack.devices.registry import open_device
from calstack.specs import SamplingParams
from tests.support.tiny_calbin import Tiny, write_tiny

GREEDY = SamplingParams(temperature=0.0)
BLOCKS = 160


@dataclasses.dataclass
class Rig:
    """A device with the tiny calbin loaded."""

    device: Device
    handle: int
    tiny: Tiny
    path: Path

    def launch(self, *lanes: LaneInput, submodel: str = "", profile: bool = False) -> Launch:
        longest = max(lane.cur_len for lane in lanes)
        return Launch(self.handle, submodel or (self.tiny.decode if longest == 1 else self.tiny.prefill), lanes, profile)

    def run(self, *lanes: LaneInput) -> Completion:
        return self.claim(self.device.submit(self.launch(*lanes)))

    def claim(self, ticket: int) -> Completion:
        done = self.device.wait(ticket, 30.0)
        assert done is not None
        if done.error is not None:
            raise done.error
        return done


def lane(past: int, tokens: Any, blocks: Sequence[int] = range(36), **more: Any) -> LaneInput:
    count = len(tokens) if hasattr(tokens, "__len__") else 1
    values: dict[str, Any] = {"emit": True, "sampling": GREEDY} | more
    return LaneInput(past_len=past, cur_len=count, blocks=blocks, tokens=tokens, **values)


@pytest.fixture(scope="session")
def tiny() -> Tiny:
    return Tiny()


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory, tiny: Tiny) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.calbin", tiny)


def _open(name: str, options: OpenOptions, tiny: Tiny, path: Path) -> Iterator[Rig]:
    device = open_device(name, options)
    try:
        yield Rig(device, device.load(path, kv_blocks=BLOCKS), tiny, path)
    finally:
        device.close()


DEVICES = ["null", pytest.param("cpu", marks=pytest.mark.native)]


@pytest.fixture(params=DEVICES)
def rig(request: pytest.FixtureRequest, tiny: Tiny, tiny_path: Path) -> Iterator[Rig]:
    yield from _open(request.param, OpenOptions(strict=True), tiny, tiny_path)


@pytest.fixture(params=DEVICES)
def slow(request: pytest.FixtureRequest, tiny: Tiny, tiny_path: Path) -> Iterator[Rig]:
    """Prefill launches take about 100 ms: by the null device's clock, or in the scalar reference."""
    options = OpenOptions(extra=(("launch_us", "100000"),)) if request.param == "null" else OpenOptions(isa="reference")
    yield from _open(request.param, options, tiny, tiny_path)


@pytest.fixture
def cpu(tiny: Tiny, tiny_path: Path) -> Iterator[Rig]:
    yield from _open("cpu", OpenOptions(strict=True), tiny, tiny_path)
