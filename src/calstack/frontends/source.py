"""Decides what a source is and opens it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from calstack.errors import CalstackError, SourceError
from calstack.progress import Progress, Silent

if TYPE_CHECKING:
    from pathlib import Path

    from calstack.graph.model import GraphBundle
    from calstack.specs import ModelSpec

__all__ = ["open_source", "peek_spec"]

_KINDS = "give a GGUF file, a Hugging Face model directory, a config.json alone, or a directory that --keep-onnx wrote"


def open_source(path: Path, *, progress: Progress | None = None) -> GraphBundle:
    """Open a model: a GGUF file, a HF directory, or a directory that `keep_onnx` wrote.

    Raises SourceError when it is none of these or damaged, UnsupportedError when this compiler cannot do it.
    """
    progress = progress or Silent()
    try:
        if path.is_dir():
            return _open_directory(path, progress)
        if path.suffix == ".json" and path.is_file():
            from calstack.frontends.config_only import open_config

            return open_config(path, progress=progress)
        if path.exists():
            from calstack.frontends.gguf_model import open_gguf

            return open_gguf(path, progress=progress)
    except OSError as error:
        raise SourceError(f"cannot be read: {error.strerror}", where=str(path), remedy="check the path and its permissions") from error
    raise SourceError("no such file or directory", where=str(path), remedy=_KINDS)


def peek_spec(path: Path) -> ModelSpec | None:
    """What a config.json alone or in a model directory says, without a graph; None for other sources and for what `open_source` refuses."""
    config = path / "config.json" if path.is_dir() else path
    if config.suffix != ".json" or not config.is_file():
        return None
    from calstack.frontends.config_only import read_config

    try:
        return read_config(config)[1]
    except CalstackError:
        return None


def _open_directory(path: Path, progress: Progress) -> GraphBundle:
    if (path / "index.json").is_file() and any((path / name).is_file() for name in ("prefill.onnx", "encode.onnx")):
        from calstack.frontends.onnx_dir import open_onnx_dir

        return open_onnx_dir(path, progress=progress)
    if (path / "config.json").is_file():
        from calstack.frontends.hf import open_hf

        return open_hf(path, progress=progress)
    found = sorted(p.name for p in path.glob("*.gguf"))
    hint = f"it holds {found[0]}: give that file" if found else _KINDS
    raise SourceError("neither config.json nor index.json with prefill.onnx is in this directory", where=str(path), remedy=hint)
