"""Bounded reading of untrusted files: every size is checked against the file before anything is allocated."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from calstack.calbin.manifest import SourceFile
from calstack.errors import SourceError
from calstack.progress import Progress

__all__ = ["DAMAGED", "bad", "hash_files", "inside", "map_file", "parse_array", "parse_json", "read_json", "read_small"]

DAMAGED = "the file is damaged or incomplete; fetch it again"
_HASH_CHUNK = 1 << 22


def bad(path: Path, field: str, what: str, remedy: str = DAMAGED) -> NoReturn:
    """Raise SourceError naming file and field. Quoted parts of `what` come from the file: keep them short."""
    where = f"{path}: {field}" if field else str(path)
    raise SourceError(what, where=where[:400], remedy=remedy)


def map_file(path: Path) -> mmap.mmap:
    """A read-only map of a regular, non-empty file; it holds the file open, so the file may be unlinked after."""
    try:
        with path.open("rb") as file:
            size = _regular_size(path, file.fileno())
            if size == 0:
                bad(path, "", "the file is empty")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        bad(path, "", f"cannot be read: {error.strerror}", "check the path and its permissions")


def _regular_size(path: Path, fd: int) -> int:
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        bad(path, "", "not a regular file", "give a file")
    return info.st_size


def read_small(path: Path, limit: int) -> bytes:
    """A whole file of at most `limit` bytes."""
    try:
        with path.open("rb") as file:
            size = _regular_size(path, file.fileno())
            if size > limit:
                bad(path, "", f"{size} bytes is more than the {limit} this file may have")
            return file.read(size)  # read(limit) would allocate the limit
    except OSError as error:
        bad(path, "", f"cannot be read: {error.strerror}", "check the path and its permissions")


def _parse(path: Path, field: str, data: bytes) -> Any:
    try:
        return json.loads(data, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        bad(path, field, f"not valid JSON: {str(error)[:120]}")


def parse_array(path: Path, data: bytes) -> list[Any]:
    """A JSON array; duplicate keys, deep nesting and other types at the top are refused."""
    value = _parse(path, "", data)
    if not isinstance(value, list):
        bad(path, "", "not a JSON array")
    return value


def parse_json(path: Path, field: str, data: bytes) -> dict[str, Any]:
    """A JSON object; duplicate keys, deep nesting and other types at the top are refused."""
    value = _parse(path, field, data)
    if not isinstance(value, dict):
        bad(path, field, "not a JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key appears twice")
    return value


def read_json(path: Path, limit: int = 64 << 20) -> dict[str, Any]:
    """A JSON object from a file of at most `limit` bytes."""
    return parse_json(path, "", read_small(path, limit))


def inside(root: Path, name: str, *, owner: Path, field: str) -> Path:
    """The path of `name` under `root`; a name that leads elsewhere is refused.

    A symbolic link below `root` is followed (hub caches are made of them); the name itself must stay inside.
    """
    relative = Path(name)
    if not name or "\0" in name or relative.is_absolute() or ".." in relative.parts:
        bad(owner, field, f"the path {name[:120]!r} leads outside its directory", "use a source whose files lie together")
    return root / relative


def hash_files(paths: Sequence[Path], root: Path, progress: Progress) -> tuple[SourceFile, ...]:
    """sha256 and size of each file, named relative to `root`."""
    progress.stage("hash the source", sum(path.stat().st_size for path in paths))
    return tuple(_hash_file(path, root, progress) for path in paths)


def _hash_file(path: Path, root: Path, progress: Progress) -> SourceFile:
    digest = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK):
            digest.update(chunk)
            size += len(chunk)
            progress.advance(len(chunk))
    return SourceFile(name=path.relative_to(root).as_posix(), sha256=digest.hexdigest(), bytes=size)
