"""`calstack replay`: runs recorded launches again and compares what comes out."""

from __future__ import annotations

from pathlib import Path

import click

from calstack.cli.params import CALBIN
from calstack.errors import CalstackError

__all__ = ["replay"]


@click.command(epilog="Example: calstack replay dumps/launches-1.json")
@click.argument("dump", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("calbin", type=CALBIN, required=False)
@click.option("--device", default="cpu", show_default=True, help="Device to run on.")
@click.option("--threads", default=0, show_default=True, help="Kernel threads; 0 = one per core.")
def replay(dump: Path, calbin: Path | None, device: str, threads: int) -> None:
    """Run the launches of DUMP again, bit for bit, with CALBIN (default: the one that the dump names)."""
    from calstack.devices.base import OpenOptions
    from calstack.devices.registry import open_device
    from calstack.runtime.dump import read_dump
    from calstack.runtime.replay import Replay

    read = read_dump(dump)
    opened = open_device(device, OpenOptions(threads=threads))
    different = launches = skipped = 0
    try:
        for done in Replay(read, opened, calbin or Path(read.calbin)).run():
            launches, skipped, different = launches + 1, skipped + done.skipped, different + bool(done.differences)
            for text in done.differences:
                click.echo(f"launch {done.launch.plan} ({done.launch.submodel}), {text}")
    finally:
        opened.close()
    click.echo(f"{launches} launches run again, {different} differ, {skipped} lanes without their context")
    if different:
        raise CalstackError(f"{different} launches do not give what was recorded", where=str(dump))
