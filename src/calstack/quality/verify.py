"""`calstack verify`: hashes, then every submodel's golden cases on a device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from calstack.calbin.inspect import size_text
from calstack.calbin.reader import Calbin, open_calbin, verify_files
from calstack.progress import Progress
from calstack.quality.encoder import Texts, check_encoder
from calstack.quality.feed import Feeder
from calstack.quality.full import WayReport, check_ways, lengths, longest
from calstack.quality.goldens import Case, digest, kl_errors, read_cases, relative_errors, run_cases

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from calstack.calbin.manifest import GoldenRef, Submodel
    from calstack.devices.base import Device

__all__ = ["SubmodelReport", "VerifyReport", "verify_calbin"]


class SubmodelReport(msgspec.Struct, frozen=True, kw_only=True):
    """One submodel's goldens. `error` is measured as `kind` says; `bits` whether all logits equal the scalar reference's."""

    submodel: str
    kind: str
    error: float
    tolerance: float
    bits: bool
    good: bool
    note: str = ""


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `verify` found; a damaged file raises instead."""

    calbin: str
    device: str
    isa: str
    bytes_hashed: int
    submodels: tuple[SubmodelReport, ...]
    good: bool
    ways: tuple[WayReport, ...] = ()  # of a full check

    def text(self) -> str:
        """For people: one line per submodel."""
        lines = [f"{self.calbin}: every checksum of {size_text(self.bytes_hashed)} is right"]
        for s in self.submodels:
            bits = "bits equal the reference" if s.bits else "BITS DIFFER from the reference"
            measure = "largest error" if s.kind == "max_abs" else "mean KL"
            lines.append(f"  {s.submodel}: {measure} {s.error:.3g} (at most {s.tolerance:.3g}), {bits}{f'; {s.note}' if s.note else ''}")
        if not self.submodels:
            lines.append("  no goldens: the calbin was compiled without them")
        for way in self.ways:
            said = f"BITS DIFFER: {'; '.join(way.differ)}" if way.differ else "the same bits"
            lines.append(f"  {way.positions} positions by {way.ways} ways: {said}")
        name = f"{self.device} ({self.isa})" if self.isa else self.device
        lines.append(f"{'good' if self.good else 'BAD'} on {name}")
        return "\n".join(lines)


def verify_calbin(path: Path, device: Device, progress: Progress, *, full: bool = False) -> VerifyReport:
    """Check a sealed calbin on an open device; `full` makes more cases on the spot.

    Raises:
        ArtifactError: when a file is damaged. DeviceError: when the device fails.
    """
    calbin = open_calbin(path)
    progress.stage("checksums", sum(entry.bytes for entry in calbin.manifest.files))
    hashed = verify_files(calbin, progress.advance)
    progress.stage("goldens", len(calbin.manifest.goldens))
    reports = _goldens(calbin, device, progress) if calbin.manifest.goldens else ()
    ways = _ways(calbin, device, progress) if full else ()
    info = device.info()
    good = all(report.good for report in reports) and not any(way.differ for way in ways)
    return VerifyReport(calbin=str(path), device=info.name, isa=info.isa, bytes_hashed=hashed, submodels=reports, good=good, ways=ways)


def _ways(calbin: Calbin, device: Device, progress: Progress) -> tuple[WayReport, ...]:
    m = calbin.manifest
    progress.stage("ways", len(lengths(m)))
    with Feeder(device, calbin.path, m, lanes=max(s.batch for s in m.submodels), positions=longest(m)) as feeder:
        return check_ways(feeder, m, progress)


def _goldens(calbin: Calbin, device: Device, progress: Progress) -> tuple[SubmodelReport, ...]:
    m = calbin.manifest
    if m.model.encoder is not None:
        return _encoder_goldens(calbin, device, progress)
    by_key = {s.key: s for s in m.submodels}
    cases = {golden.path: read_cases(calbin.read(golden.path), golden.path, m.model.vocab) for golden in m.goldens}
    longest = max(len(case.input_ids) for each in cases.values() for case in each)
    reports = []
    with Feeder(device, calbin.path, m, lanes=max(s.batch for s in m.submodels), positions=longest) as feeder:
        for golden in m.goldens:
            reports.append(_check(feeder, by_key[golden.submodel], golden, cases[golden.path]))
            progress.advance()
    return tuple(reports)


def _encoder_goldens(calbin: Calbin, device: Device, progress: Progress) -> tuple[SubmodelReport, ...]:
    by_key = {s.key: s for s in calbin.manifest.submodels}
    reports = []
    with Texts(device, calbin.path) as texts:
        for golden in calbin.manifest.goldens:
            data = calbin.read(golden.path)
            error, alike, bits = check_encoder(texts, by_key[golden.submodel], golden, data, calbin.manifest.model.vocab)
            reports.append(_report(golden, error, alike=alike, bits=bits))
            progress.advance()
    return tuple(reports)


def _check(feeder: Feeder, submodel: Submodel, golden: GoldenRef, cases: Sequence[Case]) -> SubmodelReport:
    lanes = run_cases(feeder, submodel, cases)
    first = [each[0] for each in lanes]
    error = _worst(golden, cases, first)
    alike = all(digest([other]) == digest([each[0]]) for each in lanes for other in each[1:])
    bits = digest(first) == golden.bits
    return _report(golden, error, alike=alike, bits=bits)


def _report(golden: GoldenRef, error: float, *, alike: bool, bits: bool) -> SubmodelReport:
    bits = alike and bits
    return SubmodelReport(
        submodel=golden.submodel,
        kind=golden.kind,
        error=error,
        tolerance=golden.tolerance,
        bits=bits,
        good=bits and error <= golden.tolerance,
        note="" if alike else "lanes with the same ids differ",
    )


def _worst(golden: GoldenRef, cases: Sequence[Case], logits: Sequence[npt.NDArray[np.float32]]) -> float:
    measure = relative_errors if golden.kind == "max_abs" else kl_errors
    return max(measure(case, rows) for case, rows in zip(cases, logits, strict=True))
