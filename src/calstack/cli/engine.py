"""`calstack engine`: the engine process. `calstack serve` starts it; its words are what an operator looks for in a process list."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from calstack.cli.params import CALBIN, Bytes
from calstack.errors import DeviceError

__all__ = ["engine"]


@click.command(hidden=True, epilog="Example: calstack engine m.calbin --connect /run/calstack/engine.sock --device cpu")
@click.argument("calbin", type=CALBIN)
@click.option("--connect", "--socket", "connect", type=click.Path(path_type=Path), required=True, help="Socket of the API process.")
@click.option("--device", default="cpu", show_default=True, help="Device to run on.")
@click.option("--isa", default="auto", show_default=True, help="Instruction set of the cpu device.")
@click.option("--threads", default=0, show_default=True, help="Kernel threads; 0 = one per core.")
@click.option("--completion", type=click.Choice(["event", "poll"]), default="event", show_default=True, help="How launches are waited for.")
@click.option("--depth", default=2, show_default=True, help="Launches in flight.")
@click.option("--prefill-chunk", default=0, show_default=True, help="Most prompt tokens of a launch; 0 = what the calbin allows.")
@click.option("--itl-target-ms", default=50.0, show_default=True, help="Time between tokens that prefill leaves to streams; 0 = none.")
@click.option("--kv-memory", type=Bytes(), default=0, show_default=True, help="Bytes for KV; 0 = every lane at full context.")
@click.option("--dump-dir", type=click.Path(path_type=Path), help="Where the last launches go when one fails, or on SIGUSR1.")
@click.option("--dump-quota", type=Bytes(), default=64 << 20, show_default=True, help="Most bytes of dumps kept there.")
@click.option("--speculation", type=click.Choice(["off", "lookup"]), default="off", show_default=True, help="Guess ids and check them.")
@click.option("--max-queued-requests", default=256, show_default=True, help="Requests that may wait.")
@click.option("--max-queued-tokens", default=1 << 20, show_default=True, help="Prompt tokens that may wait.")
def engine(
    calbin: Path,
    connect: Path,
    device: str,
    isa: str,
    threads: int,
    completion: str,
    speculation: str,
    dump_dir: Path | None,
    **values: float,
) -> None:
    """Serve CALBIN's tokens to the API process that listens on a unix socket."""
    from calstack.devices.base import OpenOptions
    from calstack.engine.constraints import Built
    from calstack.engine.options import EngineOptions
    from calstack.engine.start import run_engine
    from calstack.grammar import load_grammars
    from calstack.runtime.dump import DumpDirectory
    from calstack.runtime.facts import CalbinFacts

    queue_depth = max(4, int(values["depth"]))
    open_options = OpenOptions(threads=threads, isa="" if isa == "auto" else isa, queue_depth=queue_depth, completion=completion)
    options = EngineOptions(
        depth=int(values["depth"]),
        speculation=speculation == "lookup",
        prefill_chunk=int(values["prefill_chunk"]) or EngineOptions().prefill_chunk,
        itl_target_ms=values["itl_target_ms"],
        max_queued_requests=int(values["max_queued_requests"]),
        max_queued_tokens=int(values["max_queued_tokens"]),
    )
    kv_memory = int(values["kv_memory"])

    def grammars(facts: CalbinFacts) -> Built:
        return load_grammars(calbin, vocab=facts.vocab, eos=facts.eos_ids)

    dumps = DumpDirectory(dump_dir, int(values["dump_quota"])) if dump_dir is not None else None
    code = run_engine(
        calbin, connect, device=device, open_options=open_options, options=options, kv_memory=kv_memory, grammars=grammars, dumps=dumps
    )
    if code == DeviceError.exit_code:
        os._exit(code)  # a hung device must not hold the process up
    sys.exit(code)
