"""How a sentence-transformers directory makes one vector of a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from calstack.errors import UnsupportedError
from calstack.frontends import limits
from calstack.frontends.metadata import Metadata
from calstack.frontends.reading import bad, inside, parse_array, read_json, read_small
from calstack.specs import ModelSpec

__all__ = ["with_pooling"]

_MAX_BYTES = 1 << 20
_MODES = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}


def with_pooling(spec: ModelSpec, directory: Path) -> ModelSpec:
    """`spec` with pooling, normalisation and the longest text of modules.json; unchanged for decoders and where there is none."""
    path = directory / "modules.json"
    if spec.encoder is None or not path.is_file():
        return spec
    changed: dict[str, Any] = {}
    context = spec.context
    for number, module in enumerate(parse_array(path, read_small(path, _MAX_BYTES))):
        kind, place = _module(path, number, module)
        match kind:
            case "Transformer":
                context = min(context, _longest(inside(directory, place or ".", owner=path, field="path"), context))
            case "Pooling":
                changed["pooling"] = _pooling(inside(directory, place, owner=path, field="path") / "config.json")
            case "Normalize":
                changed["normalise"] = True
            case _:
                raise UnsupportedError(f"the module {kind[:40]!r} is not supported", where=f"{path}: [{number}]")
    return msgspec.structs.replace(spec, context=context, encoder=msgspec.structs.replace(spec.encoder, **changed))


def _module(path: Path, number: int, module: object) -> tuple[str, str]:
    if not isinstance(module, dict) or not isinstance(module.get("type"), str) or not isinstance(module.get("path"), str):
        bad(path, f"[{number}]", "not an object with type and path")
    return str(module["type"]).rpartition(".")[2], str(module["path"])


def _longest(directory: Path, default: int) -> int:
    path = directory / "sentence_bert_config.json"
    if not path.is_file():
        return default
    return Metadata(path, read_json(path, _MAX_BYTES)).integer("max_seq_length", 1, limits.MAX_CONTEXT, default)


def _pooling(path: Path) -> str:
    meta = Metadata(path, read_json(path, _MAX_BYTES))
    chosen = [key for key in meta.values if key.startswith("pooling_mode_") and meta.flag(key)]
    if len(chosen) != 1 or chosen[0] not in _MODES:
        raise UnsupportedError(f"the pooling {', '.join(chosen)[:80]} is not supported", where=str(path), remedy="supported: mean, cls")
    return _MODES[chosen[0]]
