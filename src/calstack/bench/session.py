"""A benchmark from set-up to report: opens the subjects, runs every point, closes everything."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from msgspec.structs import replace

from calstack import api
from calstack.bench.http import HttpSubject
from calstack.bench.machine import describe_machine, versions
from calstack.bench.ours import DeviceSubject, EngineSubject
from calstack.bench.peers import open_peer
from calstack.bench.report import Report, Row
from calstack.bench.roofline import Roofline
from calstack.bench.runner import Point, measure
from calstack.bench.subject import Subject
from calstack.errors import UsageError

__all__ = ["WAYS", "Setup", "run"]

WAYS = ("device", "engine", "http")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Who takes part, and with how much room."""

    calbin: Path
    device: str
    isa: str
    threads: int  # 0 = one per core
    lanes: int
    positions: int  # per lane
    ways: tuple[str, ...]  # of WAYS
    peers: tuple[str, ...]
    peer_model: Path | None
    roofline: bool = False
    completions: tuple[str, ...] = ("event",)  # how the device and the engine learn that a launch has ended


def run(setup: Setup, wanted: Sequence[Point], *, repeats: int, note: Callable[[str], None]) -> Report:
    """Measure every point; all subjects of a point take turns.

    Raises:
        UsageError: a peer without a model file, or not installed.
        ArtifactError, DeviceError: from the calbin or the device.
    """
    rows: list[Row] = []
    with _device(setup) as device, _subjects(setup, device) as (ours, peers):
        roof = Roofline(device.manifest, isa=device.isa, threads=device.threads) if setup.roofline else None
        for point in wanted:
            found = measure(point, ours, peers, repeats=repeats, kv_dtype=device.kv_dtype, roof=roof)
            note(_line(point, found))
            rows += found
        machine = describe_machine(cores=api.usable_cores(), threads=device.threads, isa=device.isa)
        if roof is not None:
            machine = replace(machine, read_gb_s=roof.read_gb_s, int8_gop_s=roof.int8_gop_s)
        names = {name: peer.name for name, peer in peers}
    return Report(
        machine=machine,
        versions=versions(setup.peers),
        model={"calbin": setup.calbin.name, **names},
        quality=api.quality_summary(setup.calbin),
        repeats=repeats,
        rows=rows,
    )


@contextlib.contextmanager
def _device(setup: Setup) -> Iterator[DeviceSubject]:
    with contextlib.closing(_on_device(setup, setup.completions[0])) as subject:
        yield subject


def _on_device(setup: Setup, completion: str) -> DeviceSubject:
    return DeviceSubject(
        setup.calbin,
        device=setup.device,
        isa=setup.isa,
        threads=setup.threads,
        lanes=setup.lanes,
        positions=setup.positions,
        completion=completion,
    )


@contextlib.contextmanager
def _subjects(setup: Setup, device: DeviceSubject) -> Iterator[tuple[list[tuple[str, Subject]], list[tuple[str, Subject]]]]:
    with contextlib.ExitStack() as stack:
        ours: list[tuple[str, Subject]] = []
        for way, completion in itertools.product(setup.ways, setup.completions):
            shared = way == "device" and completion == setup.completions[0]
            subject = device if shared else stack.enter_context(contextlib.closing(_open(way, setup, device, completion)))
            ours.append((way if len(setup.completions) == 1 else f"{way}, {completion}", subject))
        peers: list[tuple[str, Subject]] = []
        for name in setup.peers:
            if setup.peer_model is None:
                raise UsageError("a peer needs the model file", where=name, remedy="name it with --peer-model")
            peer = open_peer(name, setup.peer_model, threads=device.threads, context=setup.positions, lanes=setup.lanes)
            peers.append((name, stack.enter_context(contextlib.closing(peer))))
        yield ours, peers


def _open(way: str, setup: Setup, device: DeviceSubject, completion: str) -> Subject:
    if way == "device":
        return _on_device(setup, completion)
    if way == "engine":
        return EngineSubject(setup.calbin, device=setup.device, isa=setup.isa, threads=setup.threads, completion=completion)
    if completion != "event":
        raise UsageError("the server waits for events", where="--completion", remedy="compare completions through device or engine")
    arguments = ("--device", setup.device, "--threads", str(setup.threads), *(("--isa", setup.isa) if setup.isa else ()))
    return HttpSubject(setup.calbin, vocab=device.vocab, arguments=arguments)


def _line(point: Point, rows: Sequence[Row]) -> str:
    figures = " ".join(f"{row.through} {row.tok_s:.0f}" + (f" ({row.ratio:.2f}x {row.peer})" if row.ratio else "") for row in rows)
    return f"{point.phase} prompt={point.prompt} depth={point.depth} batch={point.batch}: {figures} tok/s"
