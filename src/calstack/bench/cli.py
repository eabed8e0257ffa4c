"""`calstack bench`: arguments, the run, the table."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.table import Table

from calstack.bench.peers import PEERS
from calstack.bench.plot import check_plot, plot
from calstack.bench.report import Report
from calstack.bench.runner import points
from calstack.bench.session import WAYS, Setup, run
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
@click.option("--through", default="device", show_default=True, help="Comma-separated: device, engine, http.")
@click.option("--completion", default="event", show_default=True, help="Comma-separated: event, poll. How ends of launches are learnt.")
@click.option("--roofline", is_flag=True, help="Measure the machine's ceilings too and give each row its share of the limit.")
@click.option("--plot", "picture", type=click.Path(path_type=Path), help="Also draw the rows: a .png, .svg or .pdf file.")
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
    through: str,
    completion: str,
    roofline: bool,
    picture: Path | None,
    as_json: bool,
) -> None:
    """Measure a calbin's speed, in turn with peers on the same machine."""
    if picture is not None:
        check_plot(picture)
    wanted = points(prompt, depth, batch)
    setup = Setup(
        calbin=calbin,
        device=device,
        isa=isa,
        threads=threads,
        lanes=max(batch),
        positions=max(p.positions for p in wanted),
        ways=_names(through, WAYS, "--through"),
        peers=_names(peer_names, PEERS, "--peer"),
        peer_model=peer_model,
        roofline=roofline,
        completions=_names(completion, ("event", "poll"), "--completion"),
    )
    report = run(setup, wanted, repeats=repeats, note=_note)
    if picture is not None:
        plot(report, picture)
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    else:
        _print(report)


def _names(value: str, known: tuple[str, ...], option: str) -> tuple[str, ...]:
    found = tuple(name for name in value.split(",") if name)
    for name in found:
        if name not in known:
            raise UsageError(f"{name} is not known", where=option, remedy=f"one of {', '.join(known)}")
    return found


def _note(line: str) -> None:
    click.echo(line, err=True)


def _print(report: Report) -> None:
    console = Console(width=None if sys.stdout.isatty() else 160)
    machine = report.machine
    console.print(f"{machine.cpu}, {machine.threads} threads, {machine.isa}, {machine.memory_gib} GiB, Linux {machine.kernel}")
    console.print("  ".join(f"{k} {v}" for k, v in report.versions.items()))
    console.print("quality: " + "  ".join(f"{k} {v:.5g}" if isinstance(v, float) else f"{k} {v}" for k, v in report.quality.items()))
    table = Table(
        "phase", "through", "prompt", "depth", "batch", "tok/s (min-max)", "kv", "peer", "peer tok/s (min-max)", "ratio", "of limit"
    )
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
            f"{row.share_of_limit:.0%}" if row.share_of_limit else "",
        )
    console.print(table)


def _rate(median: float, spread: tuple[float, float]) -> str:
    return f"{median:.0f} ({spread[0]:.0f}-{spread[1]:.0f})"
