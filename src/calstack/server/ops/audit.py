"""The audit log: one JSON object a line, each bound to all before it by a hash.

A line ends with `"hash"`: the SHA-256 of the hash before it (64 zeros for the first line) and of the line's own bytes up to there. A line
that was changed, removed or put in breaks the chain; one that was cut off at the end shows when the last hash is known from elsewhere.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import fcntl
import hashlib
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

from calstack.errors import ArtifactError, CalstackError, UsageError

__all__ = ["START", "AuditLog", "Chain", "verify"]

START = "0" * 64
_LINE_BYTES = 1 << 16
_LINE = re.compile(rb'(\{"seq":(\d{1,18}),.*),"hash":"([0-9a-f]{64})"\}\n', re.DOTALL)


@dataclasses.dataclass(frozen=True, slots=True)
class Chain:
    """Where a log stands: how many records it has, and the hash of the last one."""

    records: int = 0
    head: str = START


class AuditLog:
    """Appends to a log that this process alone writes. Threads may share it.

    Raises:
        UsageError: when the file cannot be opened, or another process writes to it.
        ArtifactError: when its chain is broken.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise UsageError(f"cannot be opened: {error.strerror}", where=str(path), remedy="set ops.audit_file") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._chain = verify(path)
        except OSError as error:
            os.close(self._fd)
            raise UsageError("another process writes to it", where=str(path), remedy="set another ops.audit_file") from error
        except CalstackError:
            os.close(self._fd)
            raise

    @property
    def chain(self) -> Chain:
        """Where it stands."""
        return self._chain

    def append(self, **fields: Any) -> None:
        """Add a record and wait until it is on the disk. Raises CalstackError when it cannot be written."""
        with self._lock:
            seq = self._chain.records + 1
            time = dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")
            body = msgspec.json.encode({"seq": seq, "time": time, **fields})[:-1]
            head = _link(self._chain.head, body)
            line = body + b',"hash":"' + head.encode() + b'"}\n'
            if len(line) > _LINE_BYTES:
                raise CalstackError("the record is too long", where=str(self.path))
            self._write(line)
            self._chain = Chain(seq, head)

    def _write(self, line: bytes) -> None:
        size = os.fstat(self._fd).st_size
        try:
            if os.write(self._fd, line) != len(line):
                raise OSError(28, "no space left")
            os.fdatasync(self._fd)
        except OSError as error:
            os.ftruncate(self._fd, size)  # no half lines
            raise CalstackError(f"cannot be written: {error.strerror}", where=str(self.path), remedy="make room on its disk") from error

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def verify(path: Path, head: str | None = None) -> Chain:
    """Check a whole log; gives where it stands.

    Args:
        path: the log.
        head: the last hash it must have, from elsewhere; None = whatever it has.

    Raises:
        UsageError: when it cannot be read.
        ArtifactError: naming the first line that does not fit.
    """
    chain = Chain()
    try:
        with path.open("rb") as file:
            for number, line in enumerate(_lines(file), 1):
                chain = _next(chain, line, f"{path}:{number}")
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", where=str(path), remedy="name an audit log") from error
    if head is not None and chain.head != head.lower():
        raise ArtifactError("ends with another record than the given hash", where=str(path), remedy="records were cut off or added")
    return chain


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    while line := file.readline(_LINE_BYTES + 1):
        yield line


def _next(chain: Chain, line: bytes, where: str) -> Chain:
    found = _LINE.fullmatch(line)
    if found is None:
        raise ArtifactError("is not a whole audit record", where=where, remedy="keep the file as evidence, and move it away to start anew")
    body, seq, link = found[1], int(found[2]), found[3].decode()
    if seq != chain.records + 1 or link != _link(chain.head, body):
        raise ArtifactError("the chain is broken here", where=where, remedy="keep the file as evidence, and move it away to start anew")
    return Chain(seq, link)


def _link(before: str, body: bytes) -> str:
    return hashlib.sha256(before.encode() + body).hexdigest()
