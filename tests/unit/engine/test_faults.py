"""Whatever the device does, every request ends once, with the ids it gets alone or an error, and nothing stays held."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from calstack.devices.base import Device, OpenOptions
from calstack.devices.faults import Fault, FaultPlan, FaultsDevice
from calstack.devices.registry import open_device
from calstack.engine.assemble import assemble
from calstack.engine.driver import Driver
from calstack.engine.options import EngineOptions
from calstack.errors import DeviceFatal, UsageError
from calstack.runtime.runtime import RuntimeOptions
from calstack.specs import SamplingParams
from calstack.wire import Cancel, Submit
from tests.support.constraints import ladders
from tests.support.schedule import play
from tests.support.tiny_calbin import Tiny, write_tiny

TINY = Tiny(context=256, prefill_rows=64, batch=4)
SAMPLINGS = [SamplingParams(temperature=0.0), SamplingParams(temperature=0.9, repetition_penalty=1.2)]
INNER = ["null", pytest.param("cpu", marks=pytest.mark.native)]


@pytest.fixture(scope="module")
def calbin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("faults") / "tiny.calbin", TINY)


@pytest.fixture(params=INNER)
def inner(request: pytest.FixtureRequest) -> Iterator[Device]:
    opened = open_device(request.param, OpenOptions(threads=2, strict=True))
    yield opened
    opened.close()


def request_of(i: int, *, tokens: int = 0, output: tuple[int, ...] = ()) -> Submit:
    prompt = tuple((7 * i + j) % TINY.vocab for j in range(3 + 11 * (i % 5)))
    grammar = "20,0" if i % 3 == 1 else ""
    return Submit(
        request=f"r{i}", prompt=prompt, output=output, max_tokens=tokens or 20 + i, sampling=SAMPLINGS[i % 2], seed=i, grammar=grammar
    )


def started(device: Device, calbin: Path, **runtime: object) -> Driver:
    options = RuntimeOptions(backoff_ms=0.5, **runtime)  # type: ignore[arg-type]
    return assemble(
        device, calbin, options=EngineOptions(max_restarts=50), runtime_options=options, grammars=lambda facts: ladders(facts.vocab)
    )


def alone(device: Device, calbin: Path, count: int) -> dict[str, list[int]]:
    ids: dict[str, list[int]] = {}
    driver = started(device, calbin)
    for i in range(count):
        ids |= play(driver, {0: [request_of(i)]})[0]
    driver.close()
    return ids


@pytest.mark.parametrize("fault", [Fault.BUSY, Fault.RETRYABLE, Fault.RESET, Fault.SHORT, Fault.WRONG, Fault.NAN, Fault.SLOW])
def test_a_fault_that_passes_changes_no_id(inner: Device, calbin: Path, fault: Fault) -> None:
    expected = alone(inner, calbin, 8)
    device = FaultsDevice(inner, FaultPlan(at=((3, fault), (9, fault), (10, fault)), slow_ms=3))
    driver = started(device, calbin)
    ids, ends = play(driver, {0: [request_of(i) for i in range(8)]})
    assert device.happened.count(fault) == 3
    assert ids == expected
    assert {end.reason for end in ends.values()} <= {"length", "stop"}
    assert driver.core.counters["leaks"] == 0


def test_nothing_is_lost_in_a_storm_of_faults_and_cancels(inner: Device, calbin: Path) -> None:
    expected = alone(inner, calbin, 30)
    device = FaultsDevice(inner, FaultPlan(seed=5, rate=0.08, slow_ms=1))
    driver = started(device, calbin, max_resets=20)
    script: dict[int, list[Submit | Cancel]] = {40 * n: [request_of(i) for i in range(5 * n, 5 * n + 5)] for n in range(6)}
    for n in range(6):
        script[40 * n].append(Cancel(request=f"r{5 * n + 2}"))
    ids, ends = play(driver, script)
    assert set(ends) == set(expected)
    for name, end in ends.items():
        full = expected[name]
        assert ids[name] == (full if end.reason in ("stop", "length") else full[: len(ids[name])])
    assert len(set(device.happened)) >= 5
    assert driver.core.counters["leaks"] == 0
    assert driver.core.pool.held == 0


def test_a_reset_that_fails_once_is_tried_again(inner: Device, calbin: Path) -> None:
    expected = alone(inner, calbin, 4)
    driver = started(FaultsDevice(inner, FaultPlan(at=((4, Fault.RESET),), resets=1)), calbin)
    ids, _ = play(driver, {0: [request_of(i) for i in range(4)]})
    assert ids == expected


def test_resets_that_go_on_failing_and_a_lost_device_end_the_engine(inner: Device, calbin: Path) -> None:
    for plan in (FaultPlan(at=((4, Fault.RESET),), resets=99), FaultPlan(at=((4, Fault.FATAL),))):
        with pytest.raises(DeviceFatal):
            play(started(FaultsDevice(inner, plan), calbin), {0: [request_of(i) for i in range(4)]})


def test_an_answer_that_stays_wrong_ends_each_request_with_an_error(inner: Device, calbin: Path) -> None:
    device = FaultsDevice(inner, FaultPlan(rate=1.0, kinds=(Fault.WRONG,)))
    driver = started(device, calbin)
    ids, ends = play(driver, {0: [request_of(i) for i in range(4)]})
    assert not any(ids.values())
    assert {end.reason for end in ends.values()} == {"error"}
    assert driver.core.counters["leaks"] == 0


@pytest.mark.parametrize("text", ["at=1:nosuch", "at=x:hang", "rate=often", "colour=red"])
def test_a_wrong_fault_option_is_named(text: str) -> None:
    with pytest.raises(UsageError, match=text.partition("=")[0]):
        open_device(f"faults:null?{text}")


def test_a_device_name_wraps_a_device_with_its_plan() -> None:
    device = open_device("faults:null?at=2:hang,3:slow&seed=4&rate=0.5&kinds=nan,short&resets=1&slow_ms=2")
    assert isinstance(device, FaultsDevice)
    assert device.plan == FaultPlan(
        at=((2, Fault.HANG), (3, Fault.SLOW)), seed=4, rate=0.5, kinds=(Fault.NAN, Fault.SHORT), resets=1, slow_ms=2.0
    )
    device.close()
