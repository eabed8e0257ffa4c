"""The engine over real devices and a hand-made calbin: null everywhere, cpu where the compiled module is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from calstack.devices.base import Device, OpenOptions
from calstack.devices.registry import open_device
from calstack.engine.assemble import assemble, calbin_info
from calstack.engine.driver import Driver
from calstack.engine.options import EngineOptions
from calstack.errors import ArtifactError
from calstack.specs import SamplingParams
from calstack.wire import Cancel, Submit
from tests.support.schedule import play
from tests.support.tiny_calbin import Tiny, write_tiny

TINY = Tiny(context=256, prefill_rows=64, batch=4)
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, top_k=20),
    SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.5),
]


@pytest.fixture(scope="module")
def calbin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("engine") / "tiny.calbin", TINY)


@pytest.fixture(params=["null", pytest.param("cpu", marks=pytest.mark.native)])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    opened = open_device(request.param, OpenOptions(threads=2, strict=True))
    yield opened
    opened.close()


def request_of(i: int, *, output: tuple[int, ...] = ()) -> Submit:
    prompt = (*range(40 if i % 2 else 0), *((7 * i + j) % TINY.vocab for j in range(3 + 11 * (i % 5))))
    return Submit(
        request=f"r{i}",
        prompt=prompt,
        output=output,
        max_tokens=40 + i,
        sampling=SAMPLINGS[i % 3],
        seed=i,
        choice=i % 2,
        top_logprobs=i % 3,
    )


def loaded(device: Device, calbin: Path, **options: object) -> Driver:
    return assemble(device, calbin, options=EngineOptions(**options))  # type: ignore[arg-type]


def alone(device: Device, calbin: Path) -> dict[str, list[int]]:
    driver = loaded(device, calbin, prefix_cache=False, depth=1)
    ids: dict[str, list[int]] = {}
    for i in range(10):
        ids |= play(driver, {0: [request_of(i)]})[0]
    driver.runtime.close()
    return ids


@pytest.mark.parametrize("chunk", [5, 64])
@pytest.mark.parametrize("blocks", [0, 9])
def test_ids_in_a_crowd_equal_those_alone(device: Device, calbin: Path, chunk: int, blocks: int) -> None:
    expected = alone(device, calbin)
    bytes_per_block = loaded(device, calbin).core.facts.bytes_per_block
    driver = assemble(device, calbin, options=EngineOptions(prefill_chunk=chunk), kv_memory=blocks * bytes_per_block)
    script: dict[int, list[Submit | Cancel]] = {0: [request_of(i) for i in range(6)], 60: [request_of(6), request_of(7)]}
    script[70] = [Cancel(request="r2")]
    script[120] = [request_of(8), request_of(9)]
    ids, ends = play(driver, script)
    assert len(ends) == 10
    cut = ids.pop("r2", [])
    assert cut == expected.pop("r2")[: len(cut)]
    assert ids == expected
    assert driver.core.counters["leaks"] == 0


def test_resume_continues_with_the_same_ids(device: Device, calbin: Path) -> None:
    expected = alone(device, calbin)
    driver = loaded(device, calbin)
    ids, _ = play(driver, {0: [request_of(i, output=tuple(expected[f"r{i}"][: 5 + i])) for i in range(10)]})
    assert {name: expected[name][: 5 + i] + ids[name] for i, name in enumerate(expected)} == expected


def test_an_idle_engine_holds_no_kv_memory(device: Device, calbin: Path) -> None:
    driver = loaded(device, calbin, prefix_cache=False)
    play(driver, {0: [request_of(i) for i in range(10)]})
    driver.turn()
    assert sum(chip.kv_bytes for chip in device.memory()) == 0


def test_times_add_up_to_wall_time(device: Device, calbin: Path) -> None:
    driver = loaded(device, calbin)
    play(driver, {0: [request_of(i) for i in range(10)]})
    driver.turn()
    wall = driver.ledger.wall_ns / 1e9
    assert sum(driver.ledger.seconds().values()) == pytest.approx(wall, rel=0.02)


def test_info_says_what_the_server_needs(device: Device, calbin: Path) -> None:
    info = calbin_info(loaded(device, calbin))
    assert (info.context, info.vocab, info.max_lanes) == (TINY.context, TINY.vocab, TINY.batch)
    assert info.kv_blocks == TINY.batch * TINY.context // info.kv_block_positions
    assert info.dram_total_bytes > 0


def test_too_little_kv_memory_is_refused(device: Device, calbin: Path) -> None:
    with pytest.raises(ArtifactError, match="KV blocks"):
        assemble(device, calbin, kv_memory=100)
