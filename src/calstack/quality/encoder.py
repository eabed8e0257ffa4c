"""Goldens and quality card of an encoder: embeddings and scores of a few texts, held against onnxruntime and the scalar reference.

A golden file holds, per case c: `c.input_ids` and `c.types` [n] i32, and what the encoder has of `c.embedding` [hidden] and
`c.scores` [labels] f32.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec
import numpy as np

from calstack.calbin.manifest import GoldenRef, Manifest, Submodel
from calstack.calbin.writer import CalbinWriter, encode_json
from calstack.devices.base import Device, LaneInput, LaneOutput, Launch, OpenOptions
from calstack.devices.registry import open_device
from calstack.errors import ArtifactError, DeviceError
from calstack.quality.tensors import load_tensors, save_tensors
from calstack.quality.text import QualityText, encode
from calstack.specs import WeightFormat

if TYPE_CHECKING:
    from types import TracebackType

    import numpy.typing as npt

    from calstack.graph.model import GraphBundle

    Arrays = dict[str, npt.NDArray[Any]]

__all__ = ["EncoderCard", "Texts", "add_encoder_quality", "check_encoder", "encoder_digest"]

_OUTPUTS = ("embedding", "scores")
_FLOAT_TOLERANCE = 1e-4  # of the largest |value|
_MARGIN = 3.0  # of the largest error of the card's texts
_CASES = (9, 70)  # tokens: a part of a KV block, and more than one
_CARD_TEXTS, _CARD_TOKENS = 32, 64
_TIMEOUT_S = 60.0


class EncoderCard(msgspec.Struct, frozen=True, kw_only=True):
    """How far an encoder is from the reference on texts cut from a named one. Cosines of embeddings, 1 where there is none."""

    text: dict[str, str]
    texts: int
    tokens: int
    cosine_mean: float
    cosine_min: float
    error: float  # largest |difference| over the largest |value|, of embeddings and scores


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    """Ids and segments of one text."""

    ids: tuple[int, ...]
    types: tuple[int, ...]


class Texts:
    """Runs texts on a device, each lane alone or many side by side."""

    def __init__(self, device: Device, calbin: Path) -> None:
        self._device, self._handle = device, device.load(calbin, kv_blocks=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._device.unload(self._handle)

    def run(self, submodel: Submodel, texts: Sequence[Text]) -> tuple[LaneOutput, ...]:
        """Outputs of texts that fit one launch.

        Raises:
            DeviceError: what the launch ends with.
        """
        lanes = tuple(LaneInput(past_len=0, cur_len=len(t.ids), blocks=(), tokens=t.ids, types=t.types) for t in texts)
        done = self._device.wait(self._device.submit(Launch(self._handle, submodel.key, lanes)), _TIMEOUT_S)
        if done is None:
            raise DeviceError(f"gave no answer in {_TIMEOUT_S:.0f} s", where=submodel.key, remedy="see the device's log")
        if done.error is not None:
            raise done.error
        return done.lanes


def add_encoder_quality(writer: CalbinWriter, manifest: Manifest, bundle: GraphBundle, text: QualityText, *, card: bool) -> Manifest:
    """Measure the staged encoder, add its goldens and (with `card`) `quality.json`; the manifest that names them.

    Raises:
        DeviceError, SourceError.
    """
    writer.write_manifest(manifest)
    submodel = manifest.submodels[0]
    texts = _texts(manifest, encode(bundle.tokenizer_json, text.text[:20_000]), _CASES)
    more = _texts(manifest, encode(bundle.tokenizer_json, text.text[:20_000]), (_CARD_TOKENS,) * (_CARD_TEXTS if card else 4))
    exact = all(q.format is WeightFormat.F32 for q in manifest.quant)
    measured = _measure(writer.staging, submodel, bundle, more, text)
    if card:
        writer.add("quality.json", encode_json(measured))
    with _opened(writer.staging, "reference") as reference:
        bits = encoder_digest([reference.run(submodel, [one])[0] for one in texts])
    path = f"golden/{submodel.key}.safetensors"
    writer.add(path, _write(texts, _oracle(bundle, texts)))
    tolerance = _FLOAT_TOLERANCE if exact else max(_MARGIN * measured.error, _FLOAT_TOLERANCE)
    golden = GoldenRef(submodel=submodel.key, path=path, kind="max_abs", tolerance=tolerance, bits=bits)
    return msgspec.structs.replace(manifest, goldens=(golden,))


def check_encoder(texts: Texts, submodel: Submodel, golden: GoldenRef, data: bytes, vocab: int) -> tuple[float, bool, bool]:
    """(largest error, whether lanes are alike, whether the bits are the reference's) of a golden's cases, each in the middle of others.

    Raises:
        ArtifactError: when the golden file is damaged. DeviceError.
    """
    cases, wanted = _read(data, golden.path, submodel, vocab)
    alone = [texts.run(submodel, [one])[0] for one in cases]
    room = min(submodel.batch, submodel.rows // max(len(one.ids) for one in cases))
    filled = texts.run(submodel, [cases[lane % len(cases)] for lane in range(max(room, 1))])
    alike = all(encoder_digest([out]) == encoder_digest([alone[lane % len(cases)]]) for lane, out in enumerate(filled))
    error = max(_error(out, want) for out, want in zip(alone, wanted, strict=True))
    return error, alike, encoder_digest(alone) == golden.bits


def encoder_digest(outputs: Sequence[LaneOutput]) -> str:
    """sha256 of embedding and scores of each, little-endian f32."""
    total = hashlib.sha256()
    for out in outputs:
        for value in (out.embedding, out.scores):
            if value is not None:
                total.update(np.ascontiguousarray(value, "<f4").tobytes())
    return total.hexdigest()


class _opened:  # noqa: N801  (reads as a phrase)
    """A staged calbin on a cpu device of its own."""

    def __init__(self, staging: Path, isa: str) -> None:
        self._device = open_device("cpu", OpenOptions(isa=isa))
        self._texts = Texts(self._device, staging)

    def __enter__(self) -> Texts:
        return self._texts

    def __exit__(self, *_: object) -> None:
        self._device.close()


def _texts(manifest: Manifest, ids: Sequence[int], lengths: Sequence[int]) -> list[Text]:
    """Consecutive pieces of a text; the second half of every other one is another segment, where the model has two."""
    spec, found, at = manifest.model, list[Text](), 0
    two = spec.encoder is not None and spec.encoder.types > 1
    for number, length in enumerate(lengths):
        n = min(length, manifest.submodels[0].q_len)
        part = [ids[(at + i) % len(ids)] if ids else 0 for i in range(n)]
        at += n
        types = [int(two and number % 2 == 1 and i >= n // 2) for i in range(n)]
        found.append(Text(tuple(part), tuple(types)))
    return found


def _oracle(bundle: GraphBundle, texts: Sequence[Text]) -> list[Arrays]:
    from calstack.graph.encode import run_encoder

    out = run_encoder(bundle, [one.ids for one in texts], [one.types for one in texts])
    return [{name: out[name][row] for name in _OUTPUTS if name in out} for row in range(len(texts))]


def _measure(staging: Path, submodel: Submodel, bundle: GraphBundle, texts: Sequence[Text], source: QualityText) -> EncoderCard:
    wanted = _oracle(bundle, texts)
    with _opened(staging, "") as device:
        outputs = [device.run(submodel, [one])[0] for one in texts]
    cosines = [_cosine(out.embedding, want["embedding"]) for out, want in zip(outputs, wanted, strict=True) if "embedding" in want]
    return EncoderCard(
        text={"name": source.name, "sha256": source.sha256},
        texts=len(texts),
        tokens=sum(len(one.ids) for one in texts),
        cosine_mean=float(np.mean(cosines or [1.0])),
        cosine_min=float(min(cosines, default=1.0)),
        error=max(_error(out, want) for out, want in zip(outputs, wanted, strict=True)),
    )


def _cosine(a: npt.NDArray[Any] | None, b: npt.NDArray[Any]) -> float:
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(x @ y / max(float(np.linalg.norm(x) * np.linalg.norm(y)), 1e-30))


def _error(out: LaneOutput, want: Arrays) -> float:
    """Largest |difference| over the largest |value|; infinite when something is missing or no number."""
    worst = 0.0
    for name, value in want.items():
        got = getattr(out, name)
        if got is None or got.shape != value.shape or not np.isfinite(got).all():
            return float("inf")
        worst = max(worst, float(np.abs(got - value).max() / max(float(np.abs(value).max()), 1e-30)))
    return worst


def _write(texts: Sequence[Text], wanted: Sequence[Arrays]) -> bytes:
    arrays: Arrays = {}
    for number, (one, want) in enumerate(zip(texts, wanted, strict=True)):
        arrays[f"{number}.input_ids"] = np.asarray(one.ids, np.int32)
        arrays[f"{number}.types"] = np.asarray(one.types, np.int32)
        arrays |= {f"{number}.{name}": np.asarray(value, np.float32) for name, value in want.items()}
    return save_tensors(arrays)


def _read(data: bytes, name: str, submodel: Submodel, vocab: int) -> tuple[list[Text], list[Arrays]]:
    tensors = load_tensors(data, name)
    texts, wanted = [], []
    for number in range(len({key.partition(".")[0] for key in tensors})):
        ids, types = tensors.get(f"{number}.input_ids"), tensors.get(f"{number}.types")
        want = {key: tensors[f"{number}.{key}"] for key in _OUTPUTS if f"{number}.{key}" in tensors}
        if ids is None or types is None or not want or ids.shape != types.shape or not 0 < ids.size <= submodel.q_len:
            raise ArtifactError(f"case {number} is not whole", where=name, remedy="compile the model again")
        if ids.dtype.kind != "i" or types.dtype.kind != "i" or ids.min() < 0 or ids.max() >= vocab:
            raise ArtifactError(f"ids of case {number} are out of range", where=name, remedy="compile the model again")
        texts.append(Text(tuple(ids.tolist()), tuple(types.tolist())))
        wanted.append(want)
    if not texts:
        raise ArtifactError("has no case", where=name, remedy="compile the model again")
    return texts, wanted
