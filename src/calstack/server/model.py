"""The model as the server sees it: names, tokenizer, template, defaults. Read from the calbin; the engine checks the rest of it."""

from __future__ import annotations

import dataclasses
import datetime as dt
import hashlib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from calstack import __version__
from calstack.calbin.manifest import FORMAT_MAJOR, WEIGHTLESS
from calstack.errors import ArtifactError
from calstack.grammar import CheckedGrammars
from calstack.server.params import Defaults, Vocabulary
from calstack.specs import ModelSpec
from calstack.text.template import ChatTemplate
from calstack.text.tokenizer import Tokenizer

__all__ = ["ServedModel", "load_model"]

T = TypeVar("T")

_LIMIT = 256 << 20  # bytes of any file read here
_ANEW = "compile the model again"


class _ManifestView(msgspec.Struct, frozen=True):
    """The part of the manifest that serving needs; the reader of the engine process checks all of it."""

    format_major: int
    model: ModelSpec
    requires: tuple[str, ...] = ()


class _Generation(msgspec.Struct, frozen=True):
    """generation.json, HF names."""

    eos_token_id: int | list[int] | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What requests are checked against."""

    id: str
    names: frozenset[str]
    """Every name a client may use."""
    created: int
    """When the calbin was written, seconds since 1970."""
    fingerprint: str
    """Changes with anything that may change an answer."""
    spec: ModelSpec
    tokenizer: Tokenizer
    template: ChatTemplate | None
    vocabulary: Vocabulary
    defaults: Defaults
    constraints: CheckedGrammars


def load_model(path: Path, alias: str = "", *, template_seconds: float = 2.0) -> ServedModel:
    """Read names, tokenizer, template and defaults of a calbin.

    Raises:
        ArtifactError: naming the file and the remedy.
    """
    manifest = _read(path, "manifest.json")
    view = _decode(manifest, _ManifestView, path / "manifest.json")
    if view.format_major != FORMAT_MAJOR:
        raise ArtifactError(f"format {view.format_major} is not read here", where=str(path), remedy=_ANEW)
    if WEIGHTLESS in view.requires:
        raise ArtifactError("holds no parameters (feature weightless)", where=str(path), remedy="compile the model with its weights")
    spec, generation = view.model, _generation(path)
    tokenizer = Tokenizer.from_file(path / "tokenizer.json", bos_id=spec.bos_ids[0] if spec.add_bos and spec.bos_ids else None)
    own = path.resolve().name.removesuffix(".calbin")
    size = min(spec.vocab, tokenizer.vocab_size) if tokenizer.vocab_size else spec.vocab
    return ServedModel(
        id=alias or own,
        names=frozenset({alias or own, own, spec.name} - {""}),
        created=int((path / "manifest.json").stat().st_mtime),
        fingerprint=f"calstack-{__version__}-{hashlib.sha256(manifest).hexdigest()[:10]}",
        spec=spec,
        tokenizer=tokenizer,
        template=_template(path, spec, tokenizer, template_seconds),
        vocabulary=Vocabulary(size, _end_ids(spec, generation), lambda text: tokenizer.encode(text, special=True)),
        defaults=_defaults(generation),
        constraints=CheckedGrammars(tokenizer.json, vocab=spec.vocab, eos=_end_ids(spec, generation)),
    )


def _end_ids(spec: ModelSpec, generation: _Generation) -> tuple[int, ...]:
    more = generation.eos_token_id
    ids = [*spec.eos_ids, *([more] if isinstance(more, int) else more or ())]
    return tuple(id_ for id_ in dict.fromkeys(ids) if 0 <= id_ < spec.vocab)


def _defaults(generation: _Generation) -> Defaults:
    given = {field.name: value for field in dataclasses.fields(Defaults) if (value := getattr(generation, field.name, None)) is not None}
    if generation.do_sample is False:
        given["temperature"] = 0.0
    return Defaults(**given)


def _generation(path: Path) -> _Generation:
    if not (path / "generation.json").exists():
        return _Generation()
    return _decode(_read(path, "generation.json"), _Generation, path / "generation.json")


def _template(path: Path, spec: ModelSpec, tokenizer: Tokenizer, seconds: float) -> ChatTemplate | None:
    if not (path / "chat_template.jinja").exists():
        return None
    try:
        source = _read(path, "chat_template.jinja").decode()
    except UnicodeDecodeError as error:
        raise ArtifactError("is not UTF-8", where=str(path / "chat_template.jinja"), remedy=_ANEW) from error
    first = {"bos_token": spec.bos_ids, "eos_token": spec.eos_ids, "pad_token": (spec.pad_id,) if spec.pad_id is not None else ()}
    special: dict[str, Any] = {name: tokenizer.pieces.bytes_of(ids[0]).decode("utf-8", "replace") for name, ids in first.items() if ids}
    return ChatTemplate(source, special=special, seconds=seconds, now=lambda: dt.datetime.now().astimezone())


def _read(path: Path, name: str) -> bytes:
    file = path / name
    try:
        if file.stat().st_size > _LIMIT:
            raise ArtifactError(f"is larger than {_LIMIT} bytes", where=str(file), remedy=_ANEW)
        return file.read_bytes()
    except OSError as error:
        raise ArtifactError(f"cannot be read: {error.strerror}", where=str(file), remedy="give the directory of a calbin") from error


def _decode(data: bytes, kind: type[T], file: Path) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ArtifactError(f"is not valid: {error}", where=str(file), remedy=_ANEW) from error
