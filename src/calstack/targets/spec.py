"""Hardware specs: one TOML file per target, read strictly."""

from __future__ import annotations

import importlib.resources

import msgspec

from calstack.errors import UsageError

__all__ = ["ChipSpec", "TargetSpec", "load_target", "target_names"]


class ChipSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One chip; 0 bytes = known only at run time."""

    id: int
    dram_bytes: int
    sram_bytes: int


class TargetSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the compiler must know of a target."""

    name: str
    description: str
    chips: tuple[ChipSpec, ...]
    mixed_prefill_decode: bool
    late_inputs: bool
    packed_layout: str


def target_names() -> tuple[str, ...]:
    """Targets that come with the package."""
    folder = importlib.resources.files("calstack.targets")
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")))


def load_target(name: str) -> TargetSpec:
    """The spec of a built-in target.

    Raises:
        UsageError: naming the targets there are.
    """
    if name not in target_names():
        raise UsageError(f"there is no target {name!r}", where="--target", remedy=f"targets: {', '.join(target_names())}")
    text = importlib.resources.files("calstack.targets").joinpath(f"{name}.toml").read_bytes()
    return msgspec.toml.decode(text, type=TargetSpec)
