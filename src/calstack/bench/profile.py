"""`calstack profile`: one launch, call by call, with the share of the machine's ceilings each call reaches."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from calstack import api
from calstack.bench.subject import prompt_ids

if TYPE_CHECKING:
    from calstack.api import CallTime, Completion

__all__ = ["profile", "summarise", "trace_events"]

Line = dict[str, Any]
DECODES = 33


@click.command(epilog="Example: calstack profile m.calbin --prompt 512 --depth 64")
@click.argument("calbin", type=click.Path(path_type=Path))
@click.option("--prompt", type=click.IntRange(1), default=512, show_default=True, help="Tokens of the prefill launches.")
@click.option("--depth", type=click.IntRange(1), default=64, show_default=True, help="Cache depth of the decode launch.")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Sequences of the decode launch.")
@click.option("--by", type=click.Choice(["call", "layer"]), default="call", show_default=True, help="What a row stands for.")
@click.option("--threads", type=click.IntRange(0), default=0, help="Kernel threads; 0 = one per core.")
@click.option("--isa", default="", help="Force an instruction set of the cpu device.")
@click.option("--trace", type=click.Path(path_type=Path), help="Write the calls as a Chrome trace (chrome://tracing) there.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def profile(calbin: Path, prompt: int, depth: int, batch: int, by: str, threads: int, isa: str, trace: Path | None, as_json: bool) -> None:
    """Profile one prefill and one decode launch of CALBIN on the cpu device."""
    launches = _launches(calbin, prompt=prompt, depth=depth, batch=batch, threads=threads, isa=isa)
    ceilings = api.ceilings(isa=isa, threads=threads)
    reports = {phase: summarise(done, ceilings, by=by) for phase, done in launches.items()}
    if trace is not None:
        trace.write_text(json.dumps({"traceEvents": trace_events(launches)}))
    if as_json:
        sys.stdout.write(json.dumps({"ceilings": [ceilings.read_gb_s, ceilings.int8_gop_s], **reports}) + "\n")
        return
    console = Console()
    console.print(f"ceilings: {ceilings.read_gb_s:.1f} GB/s, {ceilings.int8_gop_s:.0f} GOP/s")
    for phase, lines in reports.items():
        console.print(_table(phase, launches[phase], lines))


def _launches(calbin: Path, *, prompt: int, depth: int, batch: int, threads: int, isa: str) -> dict[str, Completion]:
    """A warm prefill of `prompt` tokens (its last launch), and of some decode launches the one that took the median time."""
    positions = max(prompt, depth + DECODES)
    session = api.open_direct(calbin, threads=threads, isa=isa, lanes=batch, positions=positions)
    with contextlib.closing(session.device), contextlib.closing(session):
        vocab = session.manifest.model.vocab
        for _ in range(2):
            session.rewind(0)
            prefill = session.prefill(prompt_ids(prompt, vocab), profile=True)[-1]
        for lane in range(batch):
            session.rewind(lane)
            session.prefill(prompt_ids(depth, vocab, salt=lane), lane=lane)
        decodes = session.decode([1 + lane for lane in range(batch)], DECODES, profile=True)
        decode = sorted(decodes, key=lambda done: done.infer_ns)[DECODES // 2]
    return {"prefill": prefill, "decode": decode}


def summarise(done: Completion, ceilings: api.Ceilings, *, by: str) -> list[Line]:
    """Rows of a launch's calls, grouped by call name or by layer, the longest first.

    `roofline` is the time that bytes over read bandwidth or operations over the int8 peak would take, as a share of the time taken.
    """
    key: Callable[[CallTime], str] = (lambda c: c.name) if by == "call" else (lambda c: str(c.layer) if c.layer >= 0 else c.name)
    groups: dict[str, list[CallTime]] = {}
    for call in done.calls:
        groups.setdefault(key(call), []).append(call)
    lines = [_line(name, calls, done.infer_ns, ceilings) for name, calls in groups.items()]
    return sorted(lines, key=lambda line: -float(line["us"]))


def _line(name: str, calls: Sequence[CallTime], whole_ns: int, ceilings: api.Ceilings) -> Line:
    ns, nbytes, ops = (max(1, sum(c.ns for c in calls)), sum(c.bytes for c in calls), sum(c.ops for c in calls))
    ideal_ns = max(nbytes / ceilings.read_gb_s, ops / ceilings.int8_gop_s)
    return {
        "name": name,
        "calls": len(calls),
        "us": ns / 1e3,
        "share": ns / max(1, whole_ns),
        "bytes": nbytes,
        "gb_s": nbytes / ns,
        "gop_s": ops / ns,
        "roofline": ideal_ns / ns,
    }


def trace_events(launches: dict[str, Completion]) -> list[Line]:
    """The calls as complete events of the Chrome trace format, microseconds; a launch is a process."""
    return [
        {"name": c.name, "ph": "X", "pid": phase, "tid": 0, "ts": c.start_ns / 1e3, "dur": c.ns / 1e3, "args": {"layer": c.layer}}
        for phase, done in launches.items()
        for c in done.calls
    ]


def _table(phase: str, done: Completion, lines: Iterable[Line]) -> Table:
    covered = sum(c.ns for c in done.calls) / max(1, done.infer_ns)
    table = Table(
        "", "calls", "us", "share", "GB/s", "GOP/s", "of roofline", title=f"{phase}: {done.infer_ns / 1e3:.0f} us, {covered:.1%} in calls"
    )
    for line in lines:
        table.add_row(
            str(line["name"]),
            str(line["calls"]),
            f"{line['us']:.0f}",
            f"{line['share']:.1%}",
            f"{line['gb_s']:.1f}",
            f"{line['gop_s']:.0f}",
            f"{line['roofline']:.0%}",
        )
    return table
