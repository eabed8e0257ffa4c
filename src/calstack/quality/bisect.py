"""`calstack verify --bisect`: the first call whose bits differ, between a device and the scalar reference, two calbins, or two submodels.

A device says for each call and row a hash of what was written. What a row is depends on earlier positions only, so of the positions that
differ the first one, and of its calls the first one, is where the difference begins. In an encoder it is the first call.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from calstack.calbin.program import Vector, Weight
from calstack.calbin.reader import Calbin, open_calbin
from calstack.devices.base import Device, OpenOptions
from calstack.devices.registry import open_device
from calstack.errors import DeviceError, UnsupportedError
from calstack.progress import Progress, Silent
from calstack.quality.encoder import Text, Texts
from calstack.quality.feed import Feeder
from calstack.quality.goldens import LENGTHS, read_cases

if TYPE_CHECKING:
    import numpy.typing as npt

    from calstack.calbin.manifest import Submodel
    from calstack.calbin.program import Call

    Prints = tuple[npt.NDArray[np.uint64], ...]  # per chip [calls, positions]

__all__ = ["BisectReport", "FirstCall", "Side", "bisect", "compare"]


class FirstCall(msgspec.Struct, frozen=True, kw_only=True):
    """Where two runs of the same ids part."""

    submodel: str
    other: str  # what it was compared with
    chip: int
    call: int  # index in the chip's stream
    op: str
    layer: int  # -1 = of no layer
    tensors: tuple[str, ...]  # parameters that it reads
    position: int


class BisectReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was compared, and the first call of each pair that differs; none = all bits are the same."""

    device: str
    against: str
    positions: int
    calls: int  # compared, over all pairs
    differ: tuple[FirstCall, ...]

    def text(self) -> str:
        """For people: one line per pair that differs."""
        if not self.differ:
            return f"  {self.calls} calls over {self.positions} positions: every row has the bits of {self.against}"
        return "\n".join(f"  {d.submodel}: {_where(d)} differs first from {d.other}, at position {d.position}" for d in self.differ)


def _where(d: FirstCall) -> str:
    layer = f" of layer {d.layer}" if d.layer >= 0 else ""
    tensors = f", {', '.join(d.tensors)}" if d.tensors else ""
    return f"call {d.call} of chip {d.chip} ({d.op}{layer}{tensors})"


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    """A calbin on an open device, and how people know it."""

    name: str
    calbin: Calbin
    device: Device


def bisect(
    calbin: str | Path,
    *,
    device: str = "cpu",
    isa: str = "",
    threads: int = 0,
    against: str | Path | None = None,
    progress: Progress | None = None,
) -> BisectReport:
    """Name the first call of each submodel whose bits differ from those of the scalar reference, or of another calbin on the same device.

    Raises:
        ArtifactError, DeviceError, UsageError: when something cannot be opened.
        UnsupportedError: when two calbins have different programs, or the device does not say what its calls wrote.
    """
    with contextlib.ExitStack() as stack:

        def side(name: str, path: Path, kind: str, isa: str) -> Side:
            found = open_device(kind, OpenOptions(isa=isa, threads=threads))
            stack.callback(found.close)
            return Side(name, open_calbin(path), found)

        own = side(f"{device} {isa}".strip(), Path(calbin), device, isa)
        if against is None:
            other = side("the scalar reference", Path(calbin), "cpu", "reference")
        else:
            other = side(str(against), Path(against), device, isa)
        return compare(own, other, progress or Silent())


def compare(side: Side, other: Side, progress: Progress) -> BisectReport:
    """Run the calbin's golden ids (or made-up ones) by every submodel of `side`, and by one of `other` for each kind of program: submodels
    give the same bits.

    Raises:
        UnsupportedError: when the calbins have different submodels or programs, or a device does not say what its calls wrote.
    """
    submodels = side.calbin.manifest.submodels
    _check_alike(side.calbin, other.calbin)
    models = {s.key: next(t for t in submodels if _ops(side.calbin, t.key) == _ops(side.calbin, s.key)) for s in submodels}
    chosen = [s for s in submodels if models[s.key] is s]
    ids = _ids(side.calbin)
    progress.stage("calls", len(submodels) + len(chosen))
    own, theirs = _run(side, submodels, ids, progress), _run(other, chosen, ids, progress)
    found = [_first(side.calbin, s.key, f"{models[s.key].key} on {other.name}", own[s.key], theirs[models[s.key].key]) for s in submodels]
    calls = sum(len(chip) for prints in own.values() for chip in prints)
    return BisectReport(
        device=side.name, against=other.name, positions=len(ids), calls=calls, differ=tuple(d for d in found if d is not None)
    )


def _check_alike(a: Calbin, b: Calbin) -> None:
    for s in a.manifest.submodels:
        same = any(t.key == s.key for t in b.manifest.submodels) and _ops(a, s.key) == _ops(b, s.key)
        if not same or a.manifest.model.vocab != b.manifest.model.vocab:
            raise UnsupportedError("has no such submodel, or other calls in it", where=f"{b.path} {s.key}", remedy="compile both alike")


def _ops(calbin: Calbin, key: str) -> list[list[str]]:
    return [[call.OP for call in stream] for stream in calbin.program(key).streams]


def _ids(calbin: Calbin) -> list[int]:
    m = calbin.manifest
    if m.goldens and m.model.encoder is None:
        cases = read_cases(calbin.read(m.goldens[0].path), m.goldens[0].path, m.model.vocab)
        return [int(i) for i in max(cases, key=lambda case: len(case.input_ids)).input_ids]
    return [int(i) for i in np.random.default_rng(1).integers(0, m.model.vocab, LENGTHS[-1])]


def _encoded(side: Side, submodels: Sequence[Submodel], ids: list[int], progress: Progress) -> dict[str, Prints]:
    found: dict[str, Prints] = {}
    with Texts(side.device, side.calbin.path, probe=True) as texts:
        for submodel in submodels:
            part = tuple(ids[: submodel.q_len])
            texts.run(submodel, [Text(part, (0,) * len(part))])
            found[submodel.key] = _some(texts.prints, side)
            progress.advance()
    return found


def _some(prints: Prints, side: Side) -> Prints:
    if not prints:
        raise UnsupportedError("the device does not say what its calls wrote", where=side.name, remedy="compare on the cpu device")
    return prints


def _run(side: Side, submodels: Sequence[Submodel], ids: list[int], progress: Progress) -> dict[str, Prints]:
    if side.calbin.manifest.model.encoder is not None:
        return _encoded(side, submodels, ids, progress)
    found: dict[str, Prints] = {}
    with Feeder(side.device, side.calbin.path, side.calbin.manifest, lanes=1, positions=len(ids), probe=True) as feeder:
        for submodel in submodels:
            feeder.prints.clear()
            feeder.run(submodel, [ids])
            launches = [_some(prints, side) for prints in feeder.prints]
            found[submodel.key] = tuple(np.concatenate(parts, axis=1) for parts in zip(*launches, strict=True))
            progress.advance()
    return found


def _first(calbin: Calbin, key: str, other: str, a: Prints, b: Prints) -> FirstCall | None:
    streams = calbin.program(key).streams
    found: list[tuple[int, int, int]] = []  # position, call, chip
    for chip, (own, theirs) in enumerate(zip(a, b, strict=True)):
        if own.shape != theirs.shape or len(own) != len(streams[chip]):
            raise DeviceError("says nothing of some calls", where=key, remedy="compare on the cpu device")
        calls, positions = np.nonzero(own != theirs)
        found += [(int(p), int(c), chip) for p, c in zip(positions, calls, strict=True)]
    if not found:
        return None
    whole = calbin.manifest.model.encoder is not None  # every position sees all
    position, index, chip = min(found, key=lambda at: (at[1], at[0], at[2]) if whole else at)
    call = streams[chip][index]
    return FirstCall(
        submodel=key, other=other, chip=chip, call=index, op=call.OP, layer=call.layer, tensors=_tensors(call), position=position
    )


def _tensors(call: Call) -> tuple[str, ...]:
    values = (getattr(call, field) for field in call.__struct_fields__)
    return tuple(value.tensor for value in values if isinstance(value, Weight | Vector))
