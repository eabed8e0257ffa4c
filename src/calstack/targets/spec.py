"""Hardware specs: one TOML file per target, read strictly. Every figure says where it comes from."""

from __future__ import annotations

import importlib.resources
from pathlib import Path
from typing import Literal

import msgspec

from calstack.errors import UsageError

__all__ = ["ChipSpec", "Figure", "KnownSpeed", "Recipe", "Speeds", "TargetSpec", "load_target", "target_names"]

_LIMIT = 1 << 20


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Figure(_Strict, frozen=True, kw_only=True):
    """A number and its origin: a data sheet, a fit to measurements, a measurement on this machine, or an assumption."""

    value: float
    origin: Literal["datasheet", "fitted", "measured", "assumed"]
    note: str = ""


class ChipSpec(_Strict, frozen=True, kw_only=True):
    """One chip; 0 bytes = known only at run time."""

    id: int
    dram_bytes: int
    sram_bytes: int
    reserved_bytes: int = 0  # of the DRAM, in use before anything is loaded
    origin: Literal["datasheet", "fitted", "measured", "assumed"] = "assumed"
    note: str = ""


class Speeds(_Strict, frozen=True, kw_only=True):
    """What the cost model needs of each chip."""

    read_gb_s: Figure  # bytes of weights and cache a second, as programs read them
    int8_gop_s: Figure  # products and additions of int8
    float_gop_s: Figure  # the same of attention's floats
    call_us: Figure  # of every call, beside its work
    sync_us: Figure  # of every meeting of chips
    link_gb_s: Figure  # host to device, one way
    launch_us: Figure  # of every launch, host side


class Recipe(_Strict, frozen=True, kw_only=True):
    """How weights are stored unless `--quant` says otherwise; the text of that option."""

    quant: str
    note: str = ""


class KnownSpeed(_Strict, frozen=True, kw_only=True):
    """A measurement on the hardware, to print beside a prediction for the same geometry."""

    layers: int
    hidden: int
    experts: int
    phase: Literal["prefill", "decode"]
    tokens: int
    tok_s: float
    source: str


class TargetSpec(_Strict, frozen=True, kw_only=True, omit_defaults=True):
    """What the compiler, the planner and the cost model must know of a target."""

    name: str
    description: str
    chips: tuple[ChipSpec, ...]
    mixed_prefill_decode: bool
    late_inputs: bool
    packed_layout: str
    speeds: Speeds
    recipe: Recipe | None = None
    known: tuple[KnownSpeed, ...] = ()


def target_names() -> tuple[str, ...]:
    """Targets that come with the package."""
    folder = importlib.resources.files("calstack.targets")
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")))


def load_target(name: str) -> TargetSpec:
    """The spec of a built-in target, or of a TOML file.

    Raises:
        UsageError: naming the targets there are, or the field of the file that is wrong.
    """
    if name.endswith(".toml"):
        return _read(Path(name))
    if name not in target_names():
        raise UsageError(f"there is no target {name!r}", where="--target", remedy=f"targets: {', '.join(target_names())}, or a .toml file")
    text = importlib.resources.files("calstack.targets").joinpath(f"{name}.toml").read_bytes()
    return msgspec.toml.decode(text, type=TargetSpec)


def _read(path: Path) -> TargetSpec:
    try:
        if path.stat().st_size > _LIMIT:
            raise UsageError("is too large for a target's spec", where=str(path), remedy="give another file")
        return msgspec.toml.decode(path.read_bytes(), type=TargetSpec)
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", where=str(path), remedy="check the path") from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise UsageError(f"is no target's spec: {error}", where=str(path), remedy="see calstack/targets/cpu.toml") from error
