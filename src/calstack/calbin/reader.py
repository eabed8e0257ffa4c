"""Opens a sealed calbin: bounded reads, typed decoding, and every reference checked before a device sees it.

Sizes and structure are checked here; hashes only in `verify_files`, which reads every byte.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import TypeVar

import msgspec

from calstack.calbin.check import check_manifest, check_program
from calstack.calbin.manifest import FORMAT_MAJOR, FORMAT_MINOR, KNOWN_FEATURES, FileEntry, Manifest
from calstack.calbin.program import Program
from calstack.calbin.shard import Shard
from calstack.calbin.versions import check_versions
from calstack.errors import ArtifactError

__all__ = ["MANIFEST", "MANIFEST_LIMIT", "PROGRAM_LIMIT", "SIDE_LIMIT", "Calbin", "open_calbin", "read_manifest", "verify_files"]

MANIFEST = "manifest.json"
MANIFEST_LIMIT = 64 << 20  # bytes
PROGRAM_LIMIT = 64 << 20
SIDE_LIMIT = 256 << 20  # tokenizer, template, goldens

_T = TypeVar("_T")

_ANEW = "compile the model again or fetch the calbin anew"


class _Version(msgspec.Struct, frozen=True):
    format_major: int
    format_minor: int = 0
    requires: tuple[str, ...] = ()


class Calbin:
    """An open calbin. Shards are mapped on first use and stay mapped as long as this object lives."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest
        self._files = {entry.path: entry for entry in manifest.files}
        self._shards: dict[int, Shard] = {}
        self._programs: dict[str, Program] = {}

    def program(self, key: str) -> Program:
        """The program of a submodel, checked against manifest and shards.

        Raises:
            ArtifactError: when the file is damaged or the submodel does not exist.
        """
        if key not in self._programs:
            submodel = next((s for s in self.manifest.submodels if s.key == key), None)
            if submodel is None:
                known = ", ".join(s.key for s in self.manifest.submodels)
                raise ArtifactError(f"has no submodel {key}", where=str(self.path), remedy=f"it has {known}")
            program = _decode(self.read(submodel.program, PROGRAM_LIMIT), Program, submodel.program)
            check_program(program, submodel, self.manifest, submodel.program)
            self._programs[key] = program
        return self._programs[key]

    def shard(self, chip: int = 0) -> Shard:
        """The mapped parameter shard of a chip.

        Raises:
            ArtifactError: when the shard does not hold what the manifest says.
        """
        if chip not in self._shards:
            entry = next((c for c in self.manifest.target.chips if c.id == chip), None)
            if entry is None:
                raise ArtifactError(f"has no chip {chip}", where=str(self.path), remedy="see `calstack inspect`")
            shard = Shard(self.path / entry.params)
            _check_shard(shard, chip, self.manifest, entry.params)
            self._shards[chip] = shard
        return self._shards[chip]

    def read(self, name: str, limit: int = SIDE_LIMIT) -> bytes:
        """Bytes of a file the manifest lists; at most `limit`."""
        if name not in self._files:
            raise ArtifactError(f"file {name} is not listed", where=f"{MANIFEST} $.files", remedy=_ANEW)
        return _read(self.path / name, limit, name)

    def has(self, name: str) -> bool:
        """Whether the manifest lists a file."""
        return name in self._files


def read_manifest(path: Path) -> Manifest:
    """The manifest of a calbin directory, its version and structure checked, nothing else.

    Raises:
        ArtifactError: when it is missing, damaged, or of a format or feature that is not read here.
    """
    if not (path / MANIFEST).is_file():
        raise ArtifactError(f"has no {MANIFEST}", where=str(path), remedy="give the directory that `calstack compile` wrote")
    data = _read(path / MANIFEST, MANIFEST_LIMIT, MANIFEST)
    _check_version(_decode(data, _Version, MANIFEST))
    return _decode(data, Manifest, MANIFEST)


def open_calbin(path: Path) -> Calbin:
    """Open a sealed calbin directory, checking everything but hashes.

    Raises:
        ArtifactError: naming the file, the field path and the remedy.
    """
    manifest = read_manifest(path)
    check_manifest(manifest, MANIFEST)
    check_versions(manifest, MANIFEST)
    for index, entry in enumerate(manifest.files):
        _check_file(path, entry, f"{MANIFEST} $.files[{index}]")
    calbin = Calbin(path, manifest)
    for chip in manifest.target.chips if not manifest.weightless else ():
        calbin.shard(chip.id)
    for submodel in manifest.submodels:
        calbin.program(submodel.key)
    return calbin


def verify_files(calbin: Calbin, progress: Callable[[int], None] | None = None) -> int:
    """Hash every listed file against the manifest; returns bytes read.

    Raises:
        ArtifactError: naming the first file that differs.
    """
    total = 0
    for index, entry in enumerate(calbin.manifest.files):
        digest = hashlib.sha256()
        with (calbin.path / entry.path).open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
                total += len(chunk)
                if progress is not None:
                    progress(len(chunk))
        if digest.hexdigest() != entry.sha256:
            where = f"{MANIFEST} $.files[{index}].sha256"
            raise ArtifactError(f"checksum of {entry.path} is {digest.hexdigest()}, not {entry.sha256}", where=where, remedy=_ANEW)
    return total


def _read(path: Path, limit: int, name: str) -> bytes:
    try:
        size = path.stat().st_size
        if size > limit:
            raise ArtifactError(f"has {size} bytes, at most {limit} are read", where=name, remedy=_ANEW)
        return path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"cannot be read: {error.strerror}", where=name, remedy=_ANEW) from error


def _decode(data: bytes, kind: type[_T], name: str) -> _T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ArtifactError(f"is not valid: {error}", where=name, remedy=_ANEW) from error


def _check_version(version: _Version) -> None:
    if version.format_major != FORMAT_MAJOR:
        found = f"{version.format_major}.{version.format_minor}"
        raise ArtifactError(
            f"format {found} is not read here, this version reads {FORMAT_MAJOR}.x (written at {FORMAT_MAJOR}.{FORMAT_MINOR})",
            where=f"{MANIFEST} $.format_major",
            remedy="use a calstack of that format, or compile the model again",
        )
    unknown = [feature for feature in version.requires if feature not in KNOWN_FEATURES]
    if unknown:
        raise ArtifactError(f"needs {', '.join(unknown)}", where=f"{MANIFEST} $.requires", remedy="use a newer calstack")


def _check_file(root: Path, entry: FileEntry, where: str) -> None:
    parts = PurePosixPath(entry.path).parts
    if not parts or entry.path.startswith("/") or ".." in parts or "\\" in entry.path or "\0" in entry.path:
        raise ArtifactError(f"path {entry.path!r} leaves the directory", where=f"{where}.path", remedy=_ANEW)
    path = root / entry.path
    try:
        inside = path.resolve(strict=True).is_relative_to(root.resolve()) and path.is_file()
        size = path.stat().st_size
    except (OSError, RuntimeError) as error:
        raise ArtifactError(f"{entry.path!r} is missing", where=f"{where}.path", remedy=_ANEW) from error
    if not inside:
        raise ArtifactError(f"{entry.path!r} is not a file inside the directory", where=f"{where}.path", remedy=_ANEW)
    if size != entry.bytes:
        raise ArtifactError(f"{entry.path} has {size} bytes, not {entry.bytes}", where=f"{where}.bytes", remedy=_ANEW)


def _check_shard(shard: Shard, chip: int, manifest: Manifest, name: str) -> None:
    wanted = {t.name: t.bytes for t in manifest.tensors if t.chip == chip}
    for tensor in shard.names():
        if tensor not in wanted:
            raise ArtifactError(f"holds {tensor}, which the manifest does not list", where=name, remedy=_ANEW)
    held = set(shard.names())
    for tensor, nbytes in wanted.items():
        room = shard.range(tensor)[1] if tensor in held else 0
        if not 0 < nbytes <= room:
            raise ArtifactError(f"{tensor} has {room} bytes, the manifest says {nbytes}", where=name, remedy=_ANEW)
