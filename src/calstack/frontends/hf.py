"""Reads a Hugging Face model directory: config, safetensors, tokenizer, template, generation defaults."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from calstack.calbin.manifest import SourceInfo
from calstack.frontends import limits
from calstack.frontends.arch import family_of
from calstack.frontends.assemble import attach_weights, check_layers
from calstack.frontends.hf_config import empty, generation_of, spec_of
from calstack.frontends.hf_pooling import with_pooling
from calstack.frontends.metadata import Metadata
from calstack.frontends.normalise import normalise
from calstack.frontends.reading import bad, hash_files, inside, read_json, read_small
from calstack.frontends.safetensors import read_safetensors
from calstack.graph.model import GraphBundle
from calstack.progress import Progress

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from calstack.frontends.mapped import MappedTensor
    from calstack.specs import ModelSpec

__all__ = ["open_hf"]

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_CONFIG_BYTES = 16 << 20
_MAX_TOKENIZER_BYTES = 128 << 20
_MAX_SHARDS = 10_000
_DERIVED = (".rotary_emb.inv_freq", "embeddings.position_ids")  # old checkpoints store what the config says


def open_hf(directory: Path, *, progress: Progress) -> GraphBundle:
    """Read a model directory.

    Raises SourceError when something is damaged or missing, UnsupportedError when this compiler cannot do it.
    """
    path = directory / "config.json"
    config = Metadata(path, read_json(path, _MAX_CONFIG_BYTES))
    spec = with_pooling(spec_of(config, name=_name(directory, config)), directory)
    tokenizer_json, tokenizer = _tokenizer(directory / "tokenizer.json", spec)
    generation, ends = generation_of(_optional(directory / "generation_config.json"), spec)
    spec = msgspec.structs.replace(spec, eos_ids=ends, add_bos=_adds_bos(tokenizer, spec))
    weights, files = _weights(directory, spec)
    named = normalise(weights, spec, family_of(spec.arch, str(path)), directory)
    check_layers(spec, named, path, "num_hidden_layers")
    graphs, tensors = attach_weights(spec, named, path=directory)
    return GraphBundle(
        spec=spec,
        graphs=graphs,
        tensors=tensors,
        tokenizer_json=tokenizer_json,
        chat_template=_chat_template(directory),
        generation=generation,
        source=SourceInfo(kind="hf", name=spec.name, files=hash_files(_source_files(directory, files), directory, progress)),
    )


def _name(directory: Path, config: Metadata) -> str:
    return (config.text("_name_or_path", "") or directory.resolve().name)[:200]


def _optional(path: Path) -> Metadata:
    return Metadata(path, read_json(path, _MAX_CONFIG_BYTES)) if path.is_file() else empty(path)


def _tokenizer(path: Path, spec: ModelSpec) -> tuple[bytes, Tokenizer]:
    if not path.is_file():
        bad(path, "", "the file is missing", "add the model's tokenizer.json")
    data = read_small(path, _MAX_TOKENIZER_BYTES)
    tokenizer = load_tokenizer(path, data)
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if not 0 <= largest < spec.vocab:
        bad(path, "model.vocab", f"the largest token id is {largest}, the model's vocabulary has {spec.vocab}")
    return data, tokenizer


def load_tokenizer(path: Path, data: bytes) -> Tokenizer:
    """Parse tokenizer.json; SourceError when the library refuses it."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_buffer(data)
    except Exception as error:  # noqa: BLE001  # the library raises plain Exception
        bad(path, "", f"not a tokenizer: {str(error)[:120]}")


def _adds_bos(tokenizer: Tokenizer, spec: ModelSpec) -> bool:
    """Whether the tokenizer itself puts a begin token before a text."""
    ids = tokenizer.encode("a", add_special_tokens=True).ids
    return bool(ids) and ids[0] in spec.bos_ids and tokenizer.encode("a", add_special_tokens=False).ids[:1] != ids[:1]


def _weights(directory: Path, spec: ModelSpec) -> tuple[dict[str, MappedTensor], list[Path]]:
    shards = _shards(directory)
    tensors: dict[str, MappedTensor] = {}
    for path, listed in shards.items():
        held = read_safetensors(path, skip=_DERIVED)
        for name in [n for n in listed if not n.endswith(_DERIVED)] if listed is not None else held:
            if name not in held:
                bad(path, f"tensor {name[:120]!r}", "the index promises this tensor here")
            tensors[name] = held[name]
    if spec.tied_embeddings:
        _drop_tied_head(directory, tensors)
    return tensors, list(shards)


def _shards(directory: Path) -> dict[Path, list[str] | None]:
    """Weight files with the tensors to take from each (None: all)."""
    if (directory / _INDEX).is_file():
        return _indexed_shards(directory)
    if not (directory / _SINGLE).is_file():
        bad(directory, _SINGLE, "the weights are missing", "only safetensors are read: convert other checkpoints to safetensors")
    return {directory / _SINGLE: None}


def _indexed_shards(directory: Path) -> dict[Path, list[str] | None]:
    index = directory / _INDEX
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        bad(index, "weight_map", "not an object of tensor names and files")
    shards: dict[Path, list[str] | None] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str):
            bad(index, f"weight_map.{name[:120]}", "not a file name")
        taken = shards.setdefault(inside(directory, file, owner=index, field=f"weight_map.{name[:120]}"), [])
        assert taken is not None
        taken.append(name)
    if len(shards) > _MAX_SHARDS:
        bad(index, "weight_map", f"{len(shards)} files are more than {_MAX_SHARDS}")
    for path in shards:
        if not path.is_file():
            bad(index, "weight_map", f"the file {path.name[:120]!r} is missing")
    return shards


def _drop_tied_head(directory: Path, tensors: dict[str, MappedTensor]) -> None:
    head, embedding = tensors.get("lm_head.weight"), tensors.get("model.embed_tokens.weight")
    if head is None or embedding is None:
        return
    same = (head.kind, head.shape) == (embedding.kind, embedding.shape) and np.array_equal(head.stored(), embedding.stored())
    if not same:
        bad(
            directory,
            "tensor 'lm_head.weight'",
            "config.json ties it to the embedding, but the two differ",
            "set tie_word_embeddings to false or remove the tensor",
        )
    del tensors["lm_head.weight"]


def _chat_template(directory: Path) -> str:
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return read_small(path, limits.MAX_TEMPLATE_BYTES).decode("utf-8")
        except UnicodeDecodeError:
            bad(path, "", "not UTF-8")
    meta = _optional(directory / "tokenizer_config.json")
    template = _default_template(meta, meta.values.get("chat_template"))
    if len(template) > limits.MAX_TEMPLATE_BYTES:
        bad(meta.path, "chat_template", f"{len(template)} characters are more than {limits.MAX_TEMPLATE_BYTES}")
    return template


def _default_template(meta: Metadata, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list):  # named templates; "default" is the one for chat
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default")
    if not isinstance(value, str):
        bad(meta.path, "chat_template", "neither a text nor a list with a default")
    return value


def _source_files(directory: Path, weights: list[Path]) -> list[Path]:
    small = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", _INDEX)
    return [path for path in (*(directory / name for name in small), *weights) if path.is_file()]
