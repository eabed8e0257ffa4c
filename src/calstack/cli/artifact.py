"""`calstack inspect` and `calstack verify`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from calstack.cli.params import CALBIN, device_options, json_option
from calstack.cli.progress import show_progress

__all__ = ["inspect", "verify"]


@click.command(epilog="Example: calstack inspect m.calbin --program decode.b1.q1.c2048.paged")
@click.argument("calbin", type=CALBIN)
@click.option("--program", metavar="KEY", help="Print the command stream of one submodel instead.")
@json_option
def inspect(calbin: Path, program: str | None, as_json: bool) -> None:
    """Show the manifest of CALBIN as a person reads it."""
    import msgspec

    from calstack.calbin.inspect import describe, describe_program
    from calstack.calbin.reader import open_calbin

    opened = open_calbin(calbin)
    if as_json:
        value = opened.program(program) if program else opened.manifest
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(value)) + b"\n")
    else:
        click.echo(describe_program(opened, program) if program else describe(opened))


@click.command(epilog="Example: calstack verify m.calbin --device cpu")
@click.argument("calbin", type=CALBIN)
@click.option("--full", is_flag=True, help="Also: the same ids by every way through the calbin, at lengths around every edge.")
@device_options
@json_option
def verify(calbin: Path, full: bool, device: str, isa: str, threads: int, as_json: bool) -> None:
    """Check CALBIN: every file's hash, then each submodel's golden outputs on a device."""
    import msgspec

    from calstack import api

    with show_progress() as progress:
        report = api.verify(calbin, device=device, isa=isa, threads=threads, progress=progress, full=full)
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    else:
        click.echo(report.text())
    if not report.good:
        sys.exit(1)
