"""`calstack bench`: arguments, the run, the table."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.table import Table

from calstack import api
from calstack.bench.machine import describe_machine, versions
from calstack.bench.ours import DeviceSubject
from calstack.bench.peers import PEERS, open_peer
from calstack.bench.report import Report, Row
from calstack.bench.runner import DECODE_STEPS, Point, measure, points
from calstack.bench.subject import Subject
from calstack.errors import UsageError

__all__ = ["bench"]


class _Ints(click.ParamType[tuple[int, ...]]):
    """Comma-separated positive integers."""

    name = "N,N,…"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            found = tuple(int(part) for part in str(value).split(",") if part)
        except ValueError:
            self.fail(f"{value!r} is not a list of integers", param, ctx)
        if not found or min(found) < 1:
            self.fail(f"{value!r}: positive integers wanted", param, ctx)
        return found


@click.command(epilog="Example: calstack bench m.calbin --prompt 128,512 --depth 64 --batch 1,16 --peer llama.cpp")
@click.argument("calbin", type=click.Path(path_type=Path))
@click.option("--prompt", type=_Ints(), default="128,512", show_default=True, help="Prompt lengths of the prefill rows.")
@click.option("--depth", type=_Ints(), default="64", show_default=True, help="Cache depths of the decode rows.")
@click.option("--batch", type=_Ints(), default="1", show_default=True, help="Sequences; batches over 1 run at the first depth only.")
@click.option("--peer", "peer_names", default="", help=f"Peers to alternate with, comma-separated: {', '.join(PEERS)}.")
@click.option("--peer-model", type=click.Path(path_type=Path), help="Model file for the peers: the one the calbin was compiled from.")
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True, help="Counted rounds; one more warms up.")
@click.option("--threads", type=click.IntRange(0), default=0, help="Worker threads, ours and the peers'; 0 = one per core.")
@click.option("--device", default="cpu", show_default=True)
@click.option("--isa", default="", help="Force an instruction set of the cpu device.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def bench(
    calbin: Path,
    prompt: tuple[int, ...],
    depth: tuple[int, ...],
    batch: tuple[int, ...],
    peer_names: str,
    peer_model: Path | None,
    repeats: int,
    threads: int,
    device: str,
    isa: str,
    as_json: bool,
) -> None:
    """Measure a calbin's speed, in turn with peers on the same machine."""
    names = tuple(name for name in peer_names.split(",") if name)
    wanted = points(prompt, depth, batch)
    positions = max(max((p.prompt for p in wanted), default=0), max((p.depth + DECODE_STEPS + 1 for p in wanted), default=0))
    lanes = max(batch)
    ours = DeviceSubject(calbin, device=device, isa=isa, threads=threads, lanes=lanes, positions=positions)
    cores = ours.threads
    peers = _open_peers(names, calbin, peer_model, threads=threads or cores, context=positions, lanes=lanes)
    report = _run(ours, peers, wanted, repeats=repeats, cores=cores, calbin=calbin, names=names)
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    else:
        _print(report)


def _open_peers(
    names: tuple[str, ...], calbin: Path, model: Path | None, *, threads: int, context: int, lanes: int
) -> list[tuple[str, Subject]]:
    if not names:
        return []
    if model is None:
        raise UsageError("a peer needs the model file", where=str(calbin), remedy="name it with --peer-model")
    source = model
    return [(name, open_peer(name, source, threads=threads, context=context, lanes=lanes)) for name in names]


def _run(
    ours: DeviceSubject,
    peers: list[tuple[str, Subject]],
    wanted: list[Point],
    *,
    repeats: int,
    cores: int,
    calbin: Path,
    names: tuple[str, ...],
) -> Report:
    console = Console(stderr=True)
    rows: list[Row] = []
    try:
        for point in wanted:
            rows += measure(
                point,
                ours,
                peers,
                through="device",
                repeats=repeats,
                kv_dtype=ours.kv_dtype,
                note=lambda line: console.print(line, style="dim"),
            )
    finally:
        machine = describe_machine(cores=cores, threads=ours.threads, isa=ours.isa)
        ours.close()
        for _, peer in peers:
            peer.close()
    return Report(
        machine=machine,
        versions=versions(names),
        model={"calbin": calbin.name, **{name: peer.name for name, peer in peers}},
        quality=api.quality_summary(calbin),
        repeats=repeats,
        rows=rows,
    )


def _print(report: Report) -> None:
    console = Console()
    machine = report.machine
    console.print(f"{machine.cpu}, {machine.threads} threads, {machine.isa}, {machine.memory_gib} GiB, Linux {machine.kernel}")
    console.print("  ".join(f"{k} {v}" for k, v in report.versions.items()))
    console.print("quality: " + "  ".join(f"{k} {v:.5g}" if isinstance(v, float) else f"{k} {v}" for k, v in report.quality.items()))
    table = Table("phase", "through", "prompt", "depth", "batch", "tok/s (min-max)", "kv", "peer", "peer tok/s (min-max)", "ratio")
    for row in report.rows:
        table.add_row(
            row.phase,
            row.through,
            str(row.prompt or ""),
            str(row.depth or ""),
            str(row.batch),
            _rate(row.tok_s, row.spread),
            row.kv_dtype,
            row.peer or "",
            _rate(row.peer_tok_s, row.peer_spread) if row.peer_tok_s and row.peer_spread else "",
            f"{row.ratio:.2f}x" if row.ratio else "",
        )
    console.print(table)


def _rate(median: float, spread: tuple[float, float]) -> str:
    return f"{median:.0f} ({spread[0]:.0f}-{spread[1]:.0f})"
