"""Writes a bundle as a self-contained directory of ONNX graphs, onnxruntime's data, and the source's stored weights."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec
import onnx_ir as ir

import calstack
from calstack.errors import UsageError
from calstack.frontends import onnx_index as layout
from calstack.graph.walk import weights_of
from calstack.progress import Progress, Silent

if TYPE_CHECKING:
    from calstack.graph.model import GraphBundle, StoredTensor

__all__ = ["keep_onnx"]


def keep_onnx(bundle: GraphBundle, directory: Path, *, progress: Progress | None = None) -> None:
    """Write `bundle` to `directory` (made if missing). The directory appears complete or not at all.

    Raises UsageError when it holds files that `keep_onnx` does not write.
    """
    directory = directory.absolute()
    strangers = sorted(p.name for p in directory.iterdir() if p.name not in layout.FILES) if directory.is_dir() else []
    if strangers or (directory.exists() and not directory.is_dir()):
        what = f"it holds {strangers[0]!r}" if strangers else "it is a file"
        raise UsageError(f"the directory for the graphs is in use: {what}", where=str(directory), remedy="name a new or empty directory")
    try:
        _write_beside(bundle, directory, progress or Silent())
    except OSError as error:
        raise UsageError(
            f"cannot be written: {error.strerror}", where=str(directory), remedy="free space or name another directory"
        ) from error


def _write_beside(bundle: GraphBundle, directory: Path, progress: Progress) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        staging.chmod(0o755)
        _write(bundle, staging, progress)
        if directory.exists():
            shutil.rmtree(directory)
        staging.rename(directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _write(bundle: GraphBundle, directory: Path, progress: Progress) -> None:
    entries = _write_weights(bundle.tensors, directory, progress)
    for role, model in bundle.graphs.items():
        ir.save(_pointing_at(model, entries), directory / layout.GRAPHS[role])
    (directory / layout.TOKENIZER).write_bytes(bundle.tokenizer_json)
    if bundle.chat_template:
        (directory / layout.TEMPLATE).write_text(bundle.chat_template, encoding="utf-8")
    index = layout.Index(
        format=layout.FORMAT,
        producer=f"calstack {calstack.__version__}",
        spec=bundle.spec,
        source=bundle.source,
        generation=dict(bundle.generation),
        tensors=entries,
    )
    (directory / layout.INDEX).write_bytes(msgspec.json.format(msgspec.json.encode(index), indent=1) + b"\n")


def _write_weights(tensors: Mapping[str, StoredTensor], directory: Path, progress: Progress) -> dict[str, layout.Entry]:
    progress.stage("write weights", len(tensors))
    entries = {}
    with (directory / layout.WEIGHTS).open("wb") as floats, (directory / layout.STORED).open("wb") as stored:
        for name, tensor in tensors.items():
            entries[name] = _write_weight(tensor, floats, stored)
            progress.advance()
    return entries


def _write_weight(tensor: StoredTensor, floats: BinaryIO, stored: BinaryIO) -> layout.Entry:
    values = tensor.float32().data.cast("B")  # f32 as the machine has it: little endian everywhere this runs
    plain = tensor.kind == "F32"
    raw = b"" if plain else tensor.stored().tobytes()
    return layout.Entry(
        kind=tensor.kind,
        shape=tensor.shape,
        sha256=hashlib.sha256(values).hexdigest(),
        float_offset=_append(floats, values),
        float_bytes=values.nbytes,
        stored_offset=-1 if plain else _append(stored, raw),
        stored_bytes=len(raw),
    )


def _append(file: BinaryIO, data: bytes | memoryview) -> int:
    at = file.tell()
    padding = -at % layout.ALIGNMENT
    file.write(bytes(padding))
    file.write(data)
    return at + padding


def _pointing_at(model: ir.Model, entries: Mapping[str, layout.Entry]) -> ir.Model:
    """A copy of the model whose weights are external data in weights.bin."""
    copy = model.clone()
    for name, value in weights_of(copy.graph).items():
        entry = entries[name]
        value.const_value = ir.ExternalTensor(
            layout.WEIGHTS, entry.float_offset, entry.float_bytes, ir.DataType.FLOAT, shape=ir.Shape(entry.shape), name=name
        )
    return copy
