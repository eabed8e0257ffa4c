"""Requests with a grammar: every id is allowed, run-ahead changes nothing, and what cannot be followed ends one request."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from calstack.devices.base import Device, OpenOptions
from calstack.devices.registry import open_device
from calstack.engine.assemble import assemble
from calstack.engine.constraints import Built, ThreadedConstraints
from calstack.engine.driver import Driver
from calstack.engine.options import EngineOptions
from calstack.specs import SamplingParams
from calstack.wire import Cancel, Submit
from tests.support.constraints import Ladder, ladders
from tests.support.schedule import play
from tests.support.tiny_calbin import Tiny, write_tiny

TINY = Tiny(context=256, prefill_rows=64, batch=4)
SAMPLINGS = [SamplingParams(temperature=0.0), SamplingParams(temperature=0.9, repetition_penalty=1.2)]


@pytest.fixture(scope="module")
def calbin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("constraints") / "tiny.calbin", TINY)


@pytest.fixture(params=["null", pytest.param("cpu", marks=pytest.mark.native)])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    opened = open_device(request.param, OpenOptions(threads=2, strict=True))
    yield opened
    opened.close()


def started(device: Device, calbin: Path, built: Built | None = None, **options: object) -> Driver:
    return assemble(device, calbin, options=EngineOptions(**options), grammars=lambda facts: built or ladders(facts.vocab))  # type: ignore[arg-type]


def request_of(i: int, grammar: str | None = None, *, output: tuple[int, ...] = (), tokens: int = 0) -> Submit:
    text = grammar if grammar is not None else ("" if i % 3 == 2 else f"{60 if i % 2 else 20},0")
    prompt = tuple((7 * i + j) % TINY.vocab for j in range(3 + 11 * (i % 5)))
    return Submit(
        request=f"r{i}", prompt=prompt, output=output, max_tokens=tokens or 30 + i, sampling=SAMPLINGS[i % 2], seed=i, grammar=text
    )  # fmt: skip


def alone(device: Device, calbin: Path, count: int = 9) -> dict[str, list[int]]:
    driver = started(device, calbin, prefix_cache=False, depth=1)
    ids: dict[str, list[int]] = {}
    for i in range(count):
        ids |= play(driver, {0: [request_of(i)]})[0]
    driver.close()
    return ids


def test_every_id_is_allowed_and_the_end_of_the_grammar_is_a_stop(device: Device, calbin: Path) -> None:
    driver = started(device, calbin)
    ids, ends = play(driver, {0: [request_of(0, "12,0", tokens=50)]})
    ladder = Ladder(TINY.vocab, "12,0")
    assert all(ladder.consume(token) for token in ids["r0"])
    assert ladder.finished
    assert ends["r0"].reason == "stop"
    assert driver.core.counters["leaks"] == 0


@pytest.mark.parametrize("blocks", [0, 6])
def test_ids_in_a_crowd_equal_those_alone_at_depth_one(device: Device, calbin: Path, blocks: int) -> None:
    expected = alone(device, calbin)
    memory = blocks * started(device, calbin).core.facts.bytes_per_block
    driver = assemble(device, calbin, options=EngineOptions(prefill_chunk=9), kv_memory=memory, grammars=lambda facts: ladders(facts.vocab))
    ids, ends = play(driver, {0: [request_of(i) for i in range(9)], 60: [Cancel(request="r3")]})
    cut = ids.pop("r3", [])
    assert cut == expected.pop("r3")[: len(cut)]
    assert ids == expected
    assert len(ends) == 9
    assert driver.core.counters["leaks"] == 0


def test_resume_goes_on_behind_the_known_ids(device: Device, calbin: Path) -> None:
    expected = alone(device, calbin)
    driver = started(device, calbin)
    ids, _ = play(driver, {0: [request_of(i, output=tuple(expected[f"r{i}"][: 5 + i])) for i in range(9)]})
    assert {name: expected[name][: 5 + i] + ids[name] for i, name in enumerate(expected)} == expected


@pytest.mark.parametrize("text", ["0,0", "30,4"])
def test_a_grammar_that_cannot_be_followed_ends_its_own_request_alone(device: Device, calbin: Path, text: str) -> None:
    expected = alone(device, calbin, 3)
    driver = started(device, calbin)
    ids, ends = play(driver, {0: [request_of(0), request_of(9, text), request_of(1), request_of(2)]})
    error = ends["r9"].error
    assert error is not None
    assert error.kind == "RequestError"
    assert {name: ids[name] for name in expected} == expected
    assert driver.core.counters["leaks"] == 0


def test_known_ids_that_break_the_grammar_are_an_error(device: Device, calbin: Path) -> None:
    wrong = next(t for t in range(TINY.vocab) if not Ladder(TINY.vocab, "5,0").allows(t))
    _, ends = play(started(device, calbin), {0: [request_of(0, "5,0", output=(wrong,))]})
    assert ends["r0"].reason == "error"


def test_a_resumed_request_whose_grammar_is_complete_stops_at_once(device: Device, calbin: Path) -> None:
    driver = started(device, calbin)
    ids, _ = play(driver, {0: [request_of(0, "5,0")]})
    more, ends = play(driver, {0: [request_of(0, "5,0", output=tuple(ids["r0"]))]})
    assert (more.get("r0", []), ends["r0"].reason) == ([], "stop")


def test_requests_without_grammar_do_not_wait_for_one_being_built(device: Device, calbin: Path) -> None:
    gate = threading.Event()

    def slow(text: str) -> Ladder:
        assert gate.wait(10)
        return Ladder(TINY.vocab, text)

    driver = started(device, calbin, slow, max_lanes=1)
    made: list[str] = []
    driver.turn([request_of(0, "5,0"), request_of(2)])
    while "r2" not in made:
        made += [out.request for out in driver.turn().tokens if out.finish is not None]
        if driver.runtime.in_flight:
            driver.wait(5.0)
    assert "r0" not in made
    driver.turn([Cancel(request="r0")])
    gate.set()
    while driver.constraints is not None and driver.constraints.pending:
        driver.constraints.wait(5.0)
        driver.turn()
    assert driver.core.idle
    assert driver.core.counters["ended_cancelled"] == 1


def test_an_engine_without_a_builder_refuses_grammars(device: Device, calbin: Path) -> None:
    _, ends = play(assemble(device, calbin), {0: [request_of(0, "5,0")]})
    error = ends["r0"].error
    assert error is not None
    assert error.kind == "NotInCalbin"


def test_a_builder_that_cannot_load_ends_each_request_with_an_error() -> None:
    def load() -> Built:
        raise OSError("no tokenizer")

    constraints = ThreadedConstraints(load)
    constraints.begin(request_of(0, "5,0"))
    constraints.wait(5.0)
    (ready,) = constraints.take()
    assert ready.constraint is None
    assert ready.error is not None
    constraints.close()
