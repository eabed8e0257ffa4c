"""Which format a packed weight gets, and by which way each of its parts gets there."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from fnmatch import fnmatchcase

from calstack.specs import QuantSpec, WeightFormat

__all__ = ["BLOCK_KINDS", "Choice", "Source", "choose"]

BLOCK_KINDS = frozenset({"Q4_0", "Q4_1", "Q8_0"})
_FLOAT_FORMAT = {"F32": WeightFormat.F32, "F16": WeightFormat.F16, "BF16": WeightFormat.BF16}
_NATURAL = {"Q4_0": WeightFormat.W4A8, "Q4_1": WeightFormat.W4A8, "Q8_0": WeightFormat.W8A8, **_FLOAT_FORMAT}
_FOURS = {"Q4_0", "Q4_1", "Q4_K"}  # a Q4_K group is 16 steps of one size: w4 with a minimum loses its scale's last bits only
_W4 = (WeightFormat.W4A8, WeightFormat.W4A16)
_IMPORT_GROUP = 32  # values per stored block


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """One source tensor of a packed weight: `kind` as it is stored now, `declared` as the source had it before an edit."""

    name: str
    kind: str
    declared: str


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """The form of a packed weight; `exact` per part: its stored bits are kept."""

    format: WeightFormat
    group: int
    minimum: bool
    exact: tuple[bool, ...]


def choose(parts: Sequence[Source], *, k: int, head: bool, quant: QuantSpec, keep: bool, router: bool = False) -> Choice:
    """The form of a weight whose `parts` are stacked by rows.

    Args:
        parts: its sources, at least one.
        k: inputs.
        head: whether it is the embedding or the head.
        quant: what the user asked for.
        keep: without a request, keep the source's form (else 8 bits).
        router: a router's choices tip with small errors, so it stays in floats unless an override names it.
    """
    asked = _asked(parts, head=head, quant=quant)
    kinds = {part.declared for part in parts}
    if router and not _overridden(parts, quant):
        asked = _widest(kinds)
    if asked is None:
        asked, minimum = _kept(kinds) if keep else (WeightFormat.W8A8, False)
    else:
        if asked in _W4 and head and quant.head is None and not kinds <= {"Q4_0", "Q4_1"}:
            asked = WeightFormat.W8A8
        minimum = asked in _W4 and (kinds != {"Q4_0"} if kinds <= {"Q4_0", "Q4_1"} else quant.minimum)
    imported = kinds & BLOCK_KINDS
    group = _IMPORT_GROUP if imported else quant.group
    if asked not in _FLOAT_FORMAT.values() and k % group:
        asked, minimum = _widest(kinds), False
    if asked in _FLOAT_FORMAT.values():
        return Choice(asked, 0, minimum=False, exact=tuple(_float_exact(part.kind, asked) for part in parts))
    return Choice(asked, group, minimum, tuple(_block_exact(part.kind, asked, minimum=minimum) for part in parts))


def _overridden(parts: Sequence[Source], quant: QuantSpec) -> bool:
    return any(fnmatchcase(part.name, pattern) for pattern, _ in quant.overrides for part in parts)


def _asked(parts: Sequence[Source], *, head: bool, quant: QuantSpec) -> WeightFormat | None:
    for pattern, fmt in quant.overrides:
        if any(fnmatchcase(part.name, pattern) for part in parts):
            return fmt
    return quant.head if head and quant.head is not None else quant.default


def _kept(kinds: set[str]) -> tuple[WeightFormat, bool]:
    """Format and minimum that keep all kinds exactly; 8 bits where none does."""
    if kinds <= _FOURS:
        return WeightFormat.W4A8, kinds != {"Q4_0"}
    if kinds <= set(_FLOAT_FORMAT):
        return _widest(kinds), False
    return WeightFormat.W8A8, False


def _widest(kinds: set[str]) -> WeightFormat:
    return _FLOAT_FORMAT[next(iter(kinds))] if len(kinds) == 1 and kinds <= set(_FLOAT_FORMAT) else WeightFormat.F32


def _float_exact(kind: str, fmt: WeightFormat) -> bool:
    return fmt is WeightFormat.F32 or _NATURAL.get(kind) is fmt


def _block_exact(kind: str, fmt: WeightFormat, *, minimum: bool) -> bool:
    if fmt is WeightFormat.W8A8:
        return kind in {"Q8_0", "Q4_0"}
    return kind == "Q4_0" or (kind == "Q4_1" and minimum)
