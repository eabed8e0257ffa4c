"""Recorded launches run again bit for bit; a changed record is noticed; dumps keep to their quota."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from calstack.devices.base import OpenOptions
from calstack.devices.registry import open_device
from calstack.engine.assemble import assemble
from calstack.errors import SourceError
from calstack.runtime.dump import Dump, DumpDirectory, dumped, read_dump
from calstack.runtime.replay import Replay, Replayed
from calstack.specs import SamplingParams
from calstack.wire import Submit
from tests.support.constraints import ladders
from tests.support.schedule import play
from tests.support.tiny_calbin import Tiny, write_tiny

TINY = Tiny(context=256, prefill_rows=64, batch=4)


@pytest.fixture(scope="module")
def calbin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("replay") / "tiny.calbin", TINY)


@pytest.fixture(params=["null", pytest.param("cpu", marks=pytest.mark.native)])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def request_of(i: int) -> Submit:
    sampling = SamplingParams(temperature=0.9, repetition_penalty=1.2) if i % 2 else SamplingParams(temperature=0.0)
    return Submit(
        request=f"r{i}", prompt=tuple(range(i, 90 + i)), max_tokens=30, sampling=sampling, seed=i, top_logprobs=i % 3,
        grammar="25,0" if i == 3 else "",
    )  # fmt: skip


def recorded(name: str, calbin: Path, tmp_path: Path) -> Path:
    device = open_device(name, OpenOptions(threads=2))
    driver = assemble(device, calbin, grammars=lambda facts: ladders(facts.vocab))
    play(driver, {0: [request_of(i) for i in range(6)]})
    data = dumped(driver.runtime.recorder.records(), calbin=str(calbin), device=name, reason="test")
    device.close()
    path = DumpDirectory(tmp_path).write(data)
    assert path is not None
    return path


def again(dump: Dump, name: str, calbin: Path) -> list[Replayed]:
    device = open_device(name, OpenOptions(threads=1))
    try:
        return list(Replay(dump, device, calbin).run())
    finally:
        device.close()


def test_launches_run_again_bit_for_bit(name: str, calbin: Path, tmp_path: Path) -> None:
    dump = read_dump(recorded(name, calbin, tmp_path))
    done = again(dump, name, calbin)
    assert [text for launch in done for text in launch.differences] == []
    assert sum(launch.compared for launch in done) >= 50, "the ring's 64 launches have at least one lane each"
    assert sum(launch.skipped for launch in done) <= 6


def test_a_changed_id_in_a_context_is_noticed(name: str, calbin: Path, tmp_path: Path) -> None:
    dump = read_dump(recorded(name, calbin, tmp_path))
    last = dump.launches[-1]
    context = list(last.lanes[0].context or ())
    context[0] = (context[0] + 1) % TINY.vocab
    lanes = [msgspec.structs.replace(last.lanes[0], context=context, token=(last.lanes[0].token + 1) % TINY.vocab), *last.lanes[1:]]
    done = again(msgspec.structs.replace(dump, launches=[msgspec.structs.replace(last, lanes=lanes)]), name, calbin)
    assert done[0].differences


def test_a_directory_keeps_to_its_quota_and_to_its_owner(tmp_path: Path) -> None:
    directory = DumpDirectory(tmp_path / "dumps", quota=250)
    paths = [directory.write(b"x" * 100) for _ in range(5)]
    assert all(path is not None for path in paths)
    kept = sorted((tmp_path / "dumps").iterdir())
    assert kept == sorted(path for path in paths[-2:] if path is not None)
    assert kept[0].stat().st_mode & 0o777 == 0o600
    assert directory.write(b"x" * 251) is None


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"format": 2, "calbin": "", "device": "", "reason": "", "launches": []}'])
def test_what_is_no_dump_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "d.json").write_text(text)
    with pytest.raises(SourceError):
        read_dump(tmp_path / "d.json")
