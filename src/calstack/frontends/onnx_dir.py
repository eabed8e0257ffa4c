"""Reads a directory of ONNX graphs that `keep_onnx` wrote, whatever has been changed in the graphs since.

The graphs are the truth. A weight whose floats still have the hash in the index comes with the source's stored bytes; one that was
changed, or is new, comes as plain f32, to be quantised anew.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import onnx_ir as ir

from calstack.calbin.manifest import SourceInfo
from calstack.errors import SourceError
from calstack.frontends import limits
from calstack.frontends import onnx_index as layout
from calstack.frontends.arch import family_of
from calstack.frontends.assemble import attach
from calstack.frontends.hf import load_tokenizer
from calstack.frontends.mapped import MappedTensor
from calstack.frontends.onnx_weights import FloatReader
from calstack.frontends.onnx_write import keep_onnx
from calstack.frontends.reading import bad, hash_files, map_file, read_small
from calstack.graph.blocks import KINDS
from calstack.graph.model import GraphBundle, StoredTensor
from calstack.graph.names import KIND_KEY
from calstack.graph.verify import verify
from calstack.graph.walk import kv_layers, weights_of
from calstack.progress import Progress
from calstack.specs import ModelSpec, Role

__all__ = ["keep_onnx", "open_onnx_dir"]

_log = logging.getLogger(__name__)
_MAX_INDEX_BYTES = 64 << 20
_MAX_GRAPH_BYTES = (2 << 30) - 1  # protobuf's own limit
_MAX_TOKENIZER_BYTES = 128 << 20
_HASH_THREADS = 2


def open_onnx_dir(directory: Path, *, progress: Progress) -> GraphBundle:
    """Read the directory.

    Raises SourceError when something is damaged, missing, or the two graphs disagree.
    """
    index = _read_index(directory / layout.INDEX)
    limits.check_spec(index.spec, directory / layout.INDEX)
    roles = (Role.PREFILL, Role.DECODE) if index.spec.encoder is None else (Role.ENCODE,)
    graphs = {role: _read_graph(directory / layout.GRAPHS[role], encoder=role is Role.ENCODE) for role in roles}
    spec = _spec_of_graphs(index, directory, graphs)
    reader, first = FloatReader(directory), roles[0]
    floats = {name: reader.tensor(directory / layout.GRAPHS[first], value) for name, value in weights_of(graphs[first].graph).items()}
    if Role.DECODE in graphs:
        _check_same_weights(directory, reader, floats, graphs[Role.DECODE])
    tensors, changed = _match_stored(directory, index, floats, progress)
    for name, tensor in tensors.items():
        for model in graphs.values():
            attach(model.graph.initializers[name], tensor)
            if name in index.tensors:  # a changed weight is quantised anew into the form its source had
                model.graph.initializers[name].metadata_props[KIND_KEY] = index.tensors[name].kind
    return GraphBundle(
        spec=spec,
        graphs=graphs,
        tensors=tensors,
        tokenizer_json=_tokenizer(directory / layout.TOKENIZER),
        chat_template=_template(directory / layout.TEMPLATE),
        generation=index.generation,
        source=_source(directory, index, changed, progress),
    )


def _read_index(path: Path) -> layout.Index:
    data = read_small(path, _MAX_INDEX_BYTES)
    try:
        version = msgspec.json.decode(data, type=dict[str, object]).get("format")
        if version != layout.FORMAT:
            bad(path, "format", f"format {str(version)[:40]} is not {layout.FORMAT}", "write the directory anew with --keep-onnx")
        return msgspec.json.decode(data, type=layout.Index)
    except (msgspec.MsgspecError, RecursionError) as error:
        bad(path, "", f"not an index: {str(error)[:160]}")


def _read_graph(path: Path, *, encoder: bool) -> ir.Model:
    data = read_small(path, _MAX_GRAPH_BYTES)
    try:
        import onnx

        proto = onnx.ModelProto.FromString(data)
        _check_texts(proto)
        with _quiet(logging.getLogger("onnx_ir")):  # it warns of what `verify` below refuses
            model = ir.from_proto(proto)
    except Exception as error:
        raise SourceError(f"not an ONNX model: {str(error)[:120]}", where=str(path), remedy="write the directory anew") from error
    verify(model, str(path), encoder=encoder)
    return model


def _check_texts(message: Any) -> None:
    """Protobuf gives a text that is not UTF-8 as bytes: refuse it before it is taken for a name."""
    for field, value in message.ListFields():
        if field.type not in {field.TYPE_STRING, field.TYPE_MESSAGE}:
            continue
        for item in [value] if isinstance(value, str | bytes) or hasattr(value, "ListFields") else value:
            if field.type == field.TYPE_MESSAGE:
                _check_texts(item)
            elif not isinstance(item, str):
                raise ValueError(f"a text in {field.full_name} is not UTF-8")


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    old = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(old)


def _spec_of_graphs(index: layout.Index, directory: Path, graphs: Mapping[Role, ir.Model]) -> ModelSpec:
    """The index's spec with as many layers as the graphs have."""
    family_of(index.spec.arch, f"{directory / layout.INDEX}: spec.arch")
    if index.spec.encoder is not None:
        return index.spec
    layers = kv_layers(graphs[Role.PREFILL].graph)
    if layers != kv_layers(graphs[Role.DECODE].graph):
        bad(directory, "kv inputs", "the prefill and decode graphs have different layers", "change both graphs alike")
    return msgspec.structs.replace(index.spec, layers=len(layers))


def _check_same_weights(directory: Path, reader: FloatReader, floats: Mapping[str, MappedTensor], decode: ir.Model) -> None:
    found = weights_of(decode.graph)
    if odd := set(found) ^ set(floats):
        bad(directory, f"initializer {min(odd)[:120]!r}", "only one of the two graphs has it", "change both graphs alike")
    for name, value in found.items():
        other = reader.tensor(directory / layout.GRAPHS[Role.DECODE], value)
        mine = floats[name]
        same_place = (mine.map is other.map, mine.offset, mine.shape, mine.kind) == (True, other.offset, other.shape, other.kind)
        if not same_place and (mine.shape != other.shape or _digest(mine) != _digest(other)):
            bad(directory, f"initializer {name[:120]!r}", "the two graphs hold different data for it", "change both graphs alike")


def _digest(tensor: MappedTensor) -> str:
    return hashlib.sha256((tensor.stored() if tensor.kind == "F32" else tensor.float32()).data).hexdigest()


def _match_stored(
    directory: Path, index: layout.Index, floats: Mapping[str, MappedTensor], progress: Progress
) -> tuple[dict[str, StoredTensor], list[str]]:
    """Per weight its stored form where the floats are unchanged, else the floats; and the names of changed ones."""
    progress.stage("check weights", len(floats))
    open_stored = _StoredFile(directory / layout.STORED)
    tensors: dict[str, StoredTensor] = {}
    changed = []
    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        for (name, tensor), digest in zip(floats.items(), pool.map(_digest, floats.values()), strict=True):
            entry = index.tensors.get(name)
            kept = entry is not None and entry.sha256 == digest and entry.shape == tensor.shape
            tensors[name] = open_stored(name, entry, tensor) if entry is not None and kept else tensor
            if not kept:
                changed.append(name)
            progress.advance()
    if changed:
        _log.warning("%s: %d weights changed since they were written (%s, ...); quantised anew", directory, len(changed), changed[0])
    return tensors, changed


class _StoredFile:
    """stored.bin, mapped when the first weight needs it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._map: mmap.mmap | None = None

    def __call__(self, name: str, entry: layout.Entry, floats: MappedTensor) -> MappedTensor:
        field = f"tensors[{name[:120]!r}]"
        index = self._path.parent / layout.INDEX
        kind = KINDS.get(entry.kind)
        if kind is None:
            bad(index, field, f"unknown kind {entry.kind[:32]!r}")
        if entry.kind == "F32":
            return floats
        if entry.shape[-1] % kind.block:
            bad(index, field, f"rows of {entry.shape[-1]} values are not whole {kind.name} blocks")
        self._map = self._map or map_file(self._path)
        tensor = MappedTensor(name, entry.kind, entry.shape, self._map, entry.stored_offset)
        if entry.stored_offset < 0 or entry.stored_bytes != tensor.nbytes or entry.stored_offset + tensor.nbytes > len(self._map):
            bad(index, field, f"{entry.stored_bytes} bytes at {entry.stored_offset} do not fit {layout.STORED} or the shape")
        return tensor


def _tokenizer(path: Path) -> bytes:
    data = read_small(path, _MAX_TOKENIZER_BYTES)
    load_tokenizer(path, data)
    return data


def _template(path: Path) -> str:
    try:
        return read_small(path, limits.MAX_TEMPLATE_BYTES).decode("utf-8") if path.is_file() else ""
    except UnicodeDecodeError:
        bad(path, "", "not UTF-8")


def _source(directory: Path, index: layout.Index, changed: list[str], progress: Progress) -> SourceInfo:
    """The graphs and index as source files; the index holds the hash of every unchanged weight, so that data are hashed again only
    when one was changed."""
    names = [name for name in layout.GRAPHS.values() if (directory / name).is_file()]
    names += [layout.INDEX, layout.TOKENIZER]
    names += [name for name in (layout.WEIGHTS,) if changed and (directory / name).is_file()]
    files = hash_files([directory / name for name in names], directory, progress)
    source = index.source
    origin = source.kind if source.kind != "onnx_dir" else source.origin
    return SourceInfo(kind="onnx_dir", name=source.name, licence=source.licence, files=files, origin=origin)
