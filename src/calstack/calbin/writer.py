"""Writes a calbin into a staging directory and seals it by one atomic rename. The same input gives the same bytes: no times, no paths."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from calstack.calbin.manifest import FileEntry, Manifest
from calstack.calbin.program import Program
from calstack.calbin.reader import MANIFEST
from calstack.calbin.shard import ShardWriter
from calstack.errors import UsageError

__all__ = ["CalbinWriter", "encode_json"]


def encode_json(value: object) -> bytes:
    """Readable, deterministic JSON of a msgspec value, ending in a newline."""
    return msgspec.json.format(msgspec.json.encode(value, order="deterministic"), indent=1) + b"\n"


class CalbinWriter:
    """Collects the files of one calbin; leaving the context without `seal` removes the staging directory.

    Args:
        dest: the calbin directory to create.
        replace: whether a calbin that stands there is replaced; anything else there is never touched.
    """

    def __init__(self, dest: Path, *, replace: bool = False) -> None:
        self.dest, self._replace = dest, replace
        _check_dest(dest, replace=replace)
        dest.parent.mkdir(parents=True, exist_ok=True)
        self.staging = Path(tempfile.mkdtemp(prefix=f".{dest.name}.", suffix=".staging", dir=dest.parent))
        self._files: dict[str, FileEntry] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        shutil.rmtree(self.staging, ignore_errors=True)

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """Entries of everything added so far, sorted by path."""
        return tuple(self._files[path] for path in sorted(self._files))

    def add(self, path: str, data: bytes) -> None:
        """Write one file; `path` is relative, with forward slashes."""
        target = self._place(path)
        target.write_bytes(data)
        self._files[path] = FileEntry(path=path, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())

    def add_program(self, path: str, program: Program) -> None:
        """Write a program as readable JSON, one call a line."""
        self.add(path, encode_program(program))

    @contextmanager
    def shard(self, path: str, sizes: Iterable[tuple[str, int]]) -> Iterator[ShardWriter]:
        """A shard to which tensors are then added in the order of `sizes`."""
        with self._place(path).open("wb") as file:
            writer = ShardWriter(file, sizes)
            yield writer
            nbytes, digest = writer.finish()
        self._files[path] = FileEntry(path=path, bytes=nbytes, sha256=digest)

    def write_manifest(self, manifest: Manifest) -> None:
        """Write the manifest into staging, its `files` replaced by what was added: the staged directory can then be opened."""
        full = msgspec.structs.replace(manifest, files=self.files)
        self._place(MANIFEST).write_bytes(encode_json(full))

    def seal(self, manifest: Manifest) -> Path:
        """Write the final manifest, sync, and rename the directory into place."""
        self.write_manifest(manifest)
        for path in sorted(self.staging.rglob("*")):
            _sync(path)
        self.staging.chmod(0o755)
        with tempfile.TemporaryDirectory(prefix=f".{self.dest.name}.", suffix=".old", dir=self.dest.parent) as old:
            _check_dest(self.dest, replace=self._replace)
            if self.dest.exists():
                self.dest.rename(Path(old) / "replaced")
            self.staging.rename(self.dest)
        _sync(self.dest.parent)
        return self.dest

    def _place(self, path: str) -> Path:
        target = self.staging / path
        assert target.resolve().is_relative_to(self.staging.resolve()), path
        target.parent.mkdir(parents=True, exist_ok=True)
        return target


def _check_dest(dest: Path, *, replace: bool) -> None:
    if not (dest.exists() or dest.is_symlink()):
        return
    if not replace:
        raise UsageError("exists already", where=str(dest), remedy="give another path, or --force to replace it")
    if dest.is_symlink() or not (dest / MANIFEST).is_file():
        raise UsageError("is not a calbin, so it is not replaced", where=str(dest), remedy="give another path")


def encode_program(program: Program) -> bytes:
    """JSON with buffers and calls one per line."""
    head = msgspec.to_builtins(program)
    buffers, streams = head.pop("buffers"), head.pop("streams")
    lines = [f" {_json(key)}: {_json(value)}," for key, value in head.items()]
    lines += [' "buffers": [', *_rows(buffers, "  "), " ],", ' "streams": [']
    for index, stream in enumerate(streams):
        lines += ["  [", *_rows(stream, "   "), "  ]" + ("," if index + 1 < len(streams) else "")]
    return ("{\n" + "\n".join([*lines, " ]"]) + "\n}\n").encode()


def _rows(items: list[object], indent: str) -> list[str]:
    return [indent + _json(item) + ("," if index + 1 < len(items) else "") for index, item in enumerate(items)]


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
