"""What quality adds to a staged calbin: the card, the goldens, their tolerances."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from calstack.calbin.manifest import GoldenRef, Manifest
from calstack.calbin.writer import CalbinWriter, encode_json
from calstack.devices.base import OpenOptions
from calstack.devices.registry import open_device
from calstack.progress import Progress
from calstack.quality.card import QualityCard, bos_of, card_windows, measure
from calstack.quality.feed import Feeder
from calstack.quality.goldens import DEFAULT_KL, Case, case_ids, digest, is_float, make_cases, write_cases
from calstack.quality.text import WINDOW, QualityText, bundled_text, encode
from calstack.specs import Role

if TYPE_CHECKING:
    from calstack.graph.evaluate import Oracle

__all__ = ["add_quality"]

_FLOAT_TOLERANCE = 1e-4  # of the largest |logit|
# Of the card's p99 and of its largest: goldens are short, and the first positions of a text lie wider than those the card scores.
_P99_MARGIN, _LARGEST_MARGIN = 3.0, 2.0


def add_quality(
    writer: CalbinWriter,
    manifest: Manifest,
    oracle: Oracle,
    tokenizer_json: bytes,
    progress: Progress,
    *,
    card: bool,
    text: QualityText | None = None,
) -> Manifest:
    """Measure the staged calbin on the cpu device, add its goldens and (with `card`) `quality.json`; the manifest that names them.

    Raises:
        UsageError: when the text is too short. DeviceError.
    """
    writer.write_manifest(manifest)
    measured = _measure(writer, manifest, oracle, tokenizer_json, progress, text or bundled_text()) if card else None
    if measured is not None:
        writer.add("quality.json", encode_json(measured))
    progress.stage("goldens")
    cases = make_cases(oracle, _sequences(manifest, tokenizer_json))
    bits = _reference_bits(writer, manifest, cases)
    return msgspec.structs.replace(manifest, goldens=_write(writer, manifest, cases, bits, measured))


def _measure(
    writer: CalbinWriter, manifest: Manifest, oracle: Oracle, tokenizer_json: bytes, progress: Progress, text: QualityText
) -> QualityCard:
    macs = max(w.per_token for s in manifest.submodels if s.role is Role.DECODE for w in s.workload if w.unit == "macs")
    device = open_device("cpu", OpenOptions())
    try:
        with Feeder(device, writer.staging, manifest, lanes=1, positions=WINDOW) as feeder:
            return measure(feeder, manifest, oracle, tokenizer_json, text, card_windows(macs), progress)
    finally:
        device.close()


def _sequences(manifest: Manifest, tokenizer_json: bytes) -> list[list[int]]:
    bos = bos_of(manifest.model)
    start = bundled_text().text[:2000]
    return case_ids([*([] if bos is None else [bos]), *encode(tokenizer_json, start)])


def _reference_bits(writer: CalbinWriter, manifest: Manifest, cases: Sequence[Case]) -> str:
    """By the scalar reference kernels, on the submodel that needs the fewest launches."""
    submodel = max(manifest.submodels, key=lambda s: s.rows)
    device = open_device("cpu", OpenOptions(isa="reference"))
    try:
        longest = max(len(case.input_ids) for case in cases)
        with Feeder(device, writer.staging, manifest, lanes=len(cases), positions=longest) as feeder:
            first = [case.rows[0] for case in cases]
            sequences = [case.input_ids.tolist() for case in cases]
            return digest([feeder.run(submodel, [ids], first=int(row))[0] for ids, row in zip(sequences, first, strict=True)])
    finally:
        device.close()


def _write(writer: CalbinWriter, manifest: Manifest, cases: Sequence[Case], bits: str, card: QualityCard | None) -> tuple[GoldenRef, ...]:
    exact = is_float(manifest)
    wide = DEFAULT_KL if card is None else max(_P99_MARGIN * card.kl_p99, _LARGEST_MARGIN * card.kl_max)
    tolerance = _FLOAT_TOLERANCE if exact else wide
    refs = []
    for submodel in manifest.submodels:
        path = f"golden/{submodel.key}.safetensors"
        writer.add(path, write_cases(cases))
        refs.append(GoldenRef(submodel=submodel.key, path=path, kind="max_abs" if exact else "kl", tolerance=tolerance, bits=bits))
    return tuple(refs)
