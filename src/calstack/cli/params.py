"""Option types and option groups that several commands share."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from calstack.specs import KVDType, QuantSpec, WeightFormat, parse_quant

__all__ = ["CALBIN", "Bytes", "Ints", "Quant", "compile_options", "device_options", "json_option"]

F = TypeVar("F", bound=Callable[..., Any])
CALBIN = click.Path(path_type=Path)
_SIZE = re.compile(r"(\d+)([kmgt]?)(i?b)?\Z", re.IGNORECASE)


class Ints(click.ParamType[tuple[int, ...]]):
    """Comma-separated positive integers, as a sorted tuple without repeats."""

    name = "N,N,…"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            found = {int(part) for part in str(value).split(",")}
        except ValueError:
            self.fail(f"{value!r} is not a list of integers such as 1,4,8", param, ctx)
        if min(found) < 1:
            self.fail(f"{value!r}: every number must be at least 1", param, ctx)
        return tuple(sorted(found))


class Bytes(click.ParamType[int]):
    """A number of bytes: 1073741824, 512M, 2GiB (all binary)."""

    name = "BYTES"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        if (match := _SIZE.match(str(value).strip())) is None:
            self.fail(f"{value!r} is not a size such as 512M or 2G", param, ctx)
        return int(match[1]) << {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}[match[2].lower()]


class Quant(click.ParamType[QuantSpec]):
    """How weights are stored: `w4a8`, or `w8a8,group=64,min=off,head=f16,GLOB=FORMAT,…`."""

    name = "QUANT"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> QuantSpec:
        if isinstance(value, QuantSpec):
            return value
        try:
            return parse_quant(str(value))
        except (ValueError, KeyError) as error:
            formats = ", ".join(WeightFormat)
            self.fail(f"{value!r}: {error}; say FORMAT[,group=N][,min=on|off][,head=FORMAT][,GLOB=FORMAT]; formats: {formats}", param, ctx)


def compile_options(command: F) -> F:
    """Options that say what to compile; `pull` and `compile` share them."""
    for option in reversed(
        (
            click.option("--quant", type=Quant(), help="Weights: w4a8, w8a8, f32, …  [default: source, as it has them]"),
            click.option("--batch", "batches", type=Ints(), default="1,4,8,16", show_default=True, help="Decode batches."),
            click.option("--context", type=click.IntRange(1), help="Most positions of a request.  [default: the model's]"),
            click.option("--kv", "kv_dtype", type=click.Choice([k.value for k in KVDType]), help="Element type of the KV cache."),
            click.option("--target", default="cpu", show_default=True, help="Hardware to compile for."),
        )
    ):
        command = option(command)
    return command


def device_options(command: F) -> F:
    """Options that choose a device; every command that computes has them."""
    for option in reversed(
        (
            click.option("--device", default="cpu", show_default=True, help="Device to run on."),
            click.option("--isa", default="auto", callback=_isa, show_default=True, help="Instruction set of the cpu device's kernels."),
            click.option("--threads", type=click.IntRange(0), default=0, help="Kernel threads.  [default: one per core]"),
        )
    ):
        command = option(command)
    return command


def _isa(_ctx: click.Context, _param: click.Parameter, value: str) -> str:
    return "" if value == "auto" else value  # the device contract says "" for its own choice


def json_option(command: F) -> F:
    """`--json`: one JSON object on stdout instead of text."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")(command)
