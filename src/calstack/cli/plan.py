"""`calstack plan`, `calstack inventory` and `calstack targets`: what is known before a compile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

from calstack.cli.app import Context
from calstack.cli.params import Ints, json_option
from calstack.cli.progress import show_progress
from calstack.errors import UnsupportedError
from calstack.specs import KVDType, QuantSpec, parse_quant
from calstack.targets.spec import load_target, target_names

if TYPE_CHECKING:
    from calstack.plan import PlanReport

__all__ = ["inventory", "plan", "targets"]

PLAN_EXAMPLE = "Example: calstack plan model.gguf --target calculet-2 --batch 1,4 --context 4096,40960"


@click.command(epilog=PLAN_EXAMPLE)
@click.argument("source")
@click.option("--target", default="cpu", show_default=True, help="Hardware: a target's name, or a .toml file like calstack's own.")
@click.option("--batch", "batches", type=Ints(), default="1,4,8,16", show_default=True, help="Decode batches.")
@click.option("--context", "contexts", type=Ints(), help="Positions of a request.  [default: the model's, at most 8,192]")
@click.option("--quant", help="Weights, as in `calstack compile`.  [default: the target's recipe]")
@click.option("--kv", "kv_dtype", type=click.Choice([k.value for k in KVDType]), help="Element type of the KV cache.")
@json_option
@click.pass_obj
def plan(
    obj: Context,
    /,
    source: str,
    target: str,
    batches: tuple[int, ...],
    contexts: tuple[int, ...] | None,
    quant: str | None,
    kv_dtype: str | None,
    as_json: bool,
) -> None:
    """Plan a compile of SOURCE, which is what `calstack compile` takes or a config.json alone. No weight is read.

    Exit code 3 when it does not fit the target.
    """
    from calstack import api
    from calstack.cli.compile import default_quant
    from calstack.frontends import hub

    text = quant or default_quant(target, "source")
    with show_progress() as progress:
        path = hub.resolve(source, obj.cache, progress)
    options = api.CompileOptions(
        target=target,
        quant=_quant(text),
        batches=batches,
        context=max(contexts or (0,)) or None,
        kv_dtype=KVDType(kv_dtype) if kv_dtype else None,
    )
    report = api.plan_model(path, options=options, contexts=contexts or (), quant=text)
    if as_json:
        click.echo(msgspec.json.encode(report).decode())
    else:
        _print(report)
    if not report.fits:
        raise UnsupportedError("; ".join(report.limits), where=f"plan for {report.target}", remedy="see what would fit above")


def _quant(text: str) -> QuantSpec:
    try:
        return parse_quant(text)
    except (ValueError, KeyError) as error:
        raise click.BadParameter(str(error), param_hint="--quant") from error


def _mib(value: float) -> str:
    return f"{value / 2**20:,.1f} MiB"


def _print(r: PlanReport) -> None:
    console = Console(width=140)
    console.print(f"{r.model} on {r.target}: weights {r.quant}, KV {r.kv_dtype}, {r.kv_bytes_per_token:,} bytes a token over all chips")
    table = Table("chip", "parameters", "activations", "KV a token", "KV blocks left", "DRAM", "largest tile", "SRAM")
    for chip in r.chips:
        left = "the machine's memory" if chip.kv_blocks_left < 0 and not chip.dram_bytes else str(chip.kv_blocks_left)
        dram, sram = (_mib(size) if size else "the machine's" for size in (chip.dram_bytes, chip.sram_bytes))
        table.add_row(
            str(chip.id), _mib(chip.params_bytes), _mib(chip.activation_bytes), f"{chip.kv_bytes_per_token:,} B", left, dram,
            f"{chip.largest_tile_bytes:,} B", sram,
        )  # fmt: skip
    console.print(table)
    console.print(
        f"host to device {r.h2d_bytes_per_step:,} bytes a decode step and lane, back {r.d2h_bytes_per_step}; "
        f"artifact {_mib(r.artifact_bytes)}, compile about {r.compile_s:.0f} s"
    )
    if any(chip.sram_bytes for chip in r.chips):
        console.print(_tiles(r))
    if r.buckets:
        console.print(_buckets(r))
    speeds = Table("phase", "tokens", "batch", "predicted tok/s", "measured by the owners", "where the time goes")
    for s in r.speeds:
        share = ", ".join(f"{op} {part:.0%}" for op, part in list(s.share.items())[:3])
        speeds.add_row(s.phase, str(s.tokens), str(s.batch), f"{s.tok_s:,.1f}", f"{s.board_tok_s}" if s.board_tok_s else "", share)
    console.print(speeds)
    console.print("not from a data sheet: " + "; ".join(r.fitted))
    for limit in r.limits:
        console.print(f"does not fit: {limit}")


def _tiles(r: PlanReport) -> Table:
    table = Table("chip", "tile of", "bytes in SRAM", "rows that fit")
    for chip in r.chips:
        for tile in chip.tiles:
            table.add_row(str(chip.id), tile.op, f"{tile.bytes:,}", f"{tile.rows_fit:,}")
    return table


def _buckets(r: PlanReport) -> Table:
    table = Table("context", "batch", "KV cache", "KV blocks", "fits", "requests that fit", "decode tok/s at its end")
    for b in r.buckets:
        left = "" if b.lanes_fit < 0 else str(b.lanes_fit)
        table.add_row(str(b.context), str(b.batch), _mib(b.kv_bytes), str(b.kv_blocks), "yes" if b.fits else "no", left, f"{b.tok_s:,.1f}")
    return table


@click.command(epilog="Example: calstack inventory model.gguf --json")
@click.argument("source")
@json_option
@click.pass_obj
def inventory(obj: Context, /, source: str, as_json: bool) -> None:
    """List the operators of SOURCE: a model, or any ONNX file."""
    from calstack import api
    from calstack.frontends import hub

    with show_progress() as progress:
        path = Path(source) if source.endswith(".onnx") else hub.resolve(source, obj.cache, progress)
    rows = api.inventory(path)
    if as_json:
        click.echo(msgspec.json.encode(rows).decode())
        return
    table = Table("operator", "class", "count", "dtypes", "shapes", "dynamic axes", "tolerance", "share", "what becomes of it")
    for row in rows:
        table.add_row(*(str(cell) for cell in _cells(row)))
    Console(width=180).print(table)


def _cells(row: Any) -> tuple[str, ...]:
    share = f"{row.share:.1%}" if row.share else ""
    return (row.op, row.kind, str(row.count), ", ".join(row.dtypes), row.shapes, ", ".join(row.axes), row.tolerance, share, row.note)


@click.command(epilog="Example: calstack targets --measure > cpu.toml && calstack plan model.gguf --target cpu.toml")
@click.option("--measure", is_flag=True, help="Measure this machine and print its spec as TOML.")
@json_option
def targets(measure: bool, as_json: bool) -> None:
    """List the targets and where each of their figures comes from."""
    if measure:
        from calstack import api

        click.echo(msgspec.toml.encode(api.measured_target()).decode(), nl=False)
        return
    specs = [load_target(name) for name in target_names()]
    if as_json:
        click.echo(msgspec.json.encode(specs).decode())
        return
    table = Table("target", "chips", "figure", "value", "origin", "note")
    for spec in specs:
        for name in spec.speeds.__struct_fields__:
            figure = getattr(spec.speeds, name)
            table.add_row(spec.name, str(len(spec.chips)), name, f"{figure.value:g}", figure.origin, figure.note)
    Console(width=140).print(table)
