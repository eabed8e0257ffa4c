"""`calstack explain-mismatch`: why an artifact does not fit a device or a request, and the nearest that does."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from calstack.calbin.compat import Mismatch, Wish, mismatches, nearest
from calstack.calbin.reader import read_manifest
from calstack.cli.params import CALBIN, json_option
from calstack.errors import UnsupportedError
from calstack.specs import Role

__all__ = ["explain_mismatch"]


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints."""

    calbin: str
    fits: bool
    nearest: str = ""
    mismatches: tuple[Mismatch, ...] = ()


@click.command("explain-mismatch", epilog="Example: calstack explain-mismatch m.calbin --role decode --batch 32 --context 40960")
@click.argument("calbin", type=CALBIN)
@click.option("--device", type=click.Choice(["cpu"]), default="cpu", show_default=True, help="Device to fit.")
@click.option("--role", type=click.Choice([r.value for r in Role]), help="A launch to fit, with the three numbers below.")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Lanes of the launch.")
@click.option("--tokens", type=click.IntRange(1), default=1, show_default=True, help="Tokens of a lane.")
@click.option("--context", type=click.IntRange(1), default=1, show_default=True, help="Positions of a lane.")
@json_option
def explain_mismatch(calbin: Path, device: str, role: str | None, batch: int, tokens: int, context: int, as_json: bool) -> None:
    """Compare CALBIN's manifest with a device, and with a launch if --role is given. Exit code 3 when something does not fit."""
    from calstack.devices.cpu import OFFER

    assert device == OFFER.name
    manifest = read_manifest(calbin)
    found, best = list(mismatches(manifest, OFFER)), ""
    if manifest.weightless:
        found.append(Mismatch("$.requires", "weightless", "parameters", "compile the model with its weights"))
    if role is not None:
        submodel, missed = nearest(manifest, Wish(role=Role(role), batch=batch, tokens=tokens, context=context))
        best = submodel.key if submodel is not None else ""
        found += missed
    report = Explanation(calbin=str(calbin), fits=not found, nearest=best, mismatches=tuple(found))
    click.echo(msgspec.json.encode(report).decode()) if as_json else _print(report)
    if found and as_json:
        raise SystemExit(3)
    if found:
        raise UnsupportedError(f"{len(found)} fields do not fit", where=str(calbin), remedy="see the table")


def _print(report: Explanation) -> None:
    console = Console(width=140)
    if report.nearest:
        console.print(f"nearest submodel: {report.nearest}")
    if report.fits:
        console.print("everything fits")
        return
    table = Table("field", "calbin", "asked or offered", "remedy")
    for m in report.mismatches:
        table.add_row(*(escape(text) for text in (m.field, m.calbin, m.device, m.remedy)))
    console.print(table)
