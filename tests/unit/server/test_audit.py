"""The audit log's chain: what breaks it, and what it survives."""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from calstack.errors import ArtifactError, UsageError
from calstack.server.ops.audit import START, AuditLog, Chain, verify


def written(path: Path, count: int = 5) -> Path:
    log = AuditLog(path)
    for number in range(count):
        log.append(who="uid:0", action="/reset", outcome="begun", detail={"n": number, "text": 'ü"\n,"hash":"'})
    log.close()
    return path


def test_chain_goes_on_after_a_restart(tmp_path: Path) -> None:
    path = written(tmp_path / "a")
    first = verify(path)
    log = AuditLog(path)
    assert log.chain == first
    log.append(who="x", action="y", outcome="done", detail="")
    log.close()
    assert verify(path) == log.chain
    assert verify(path).records == 6


def test_hash_is_what_the_documentation_says(tmp_path: Path) -> None:
    head = START
    for line in written(tmp_path / "a").read_bytes().splitlines():
        body = line[: line.rindex(b',"hash":"')]
        head = hashlib.sha256(head.encode() + body).hexdigest()
        assert json.loads(line)["hash"] == head
    assert verify(tmp_path / "a", head.upper()) == Chain(5, head)


def test_empty_log_is_valid(tmp_path: Path) -> None:
    assert verify(written(tmp_path / "a", 0)) == Chain()


def _swap(lines: list[bytes]) -> list[bytes]:
    return [lines[0], lines[2], lines[1], *lines[3:]]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda lines: [lines[0], lines[1].replace(b"/reset", b"/dummy"), *lines[2:]], 2),
        (lambda lines: [lines[0], *lines[2:]], 2),
        (lambda lines: lines[1:], 1),
        (_swap, 2),
        (lambda lines: [lines[0], lines[0], *lines[1:]], 2),
        (lambda lines: [*lines[:4], lines[4][:-1]], 5),
        (lambda lines: [*lines, b"\n"], 6),
        (lambda lines: [*lines, b"x" * 100_000], 6),
        (lambda lines: [*lines, b'{"seq":6}\n'], 6),
    ],
)
def test_line_that_was_changed_removed_moved_or_added_is_named(
    tmp_path: Path, change: Callable[[list[bytes]], list[bytes]], line: int
) -> None:
    path = written(tmp_path / "a")
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
    with pytest.raises(ArtifactError, match=rf"a:{line}: "):
        verify(path)
    with pytest.raises(ArtifactError):
        AuditLog(path)


def test_cut_end_shows_against_a_known_head(tmp_path: Path) -> None:
    path = written(tmp_path / "a")
    head = verify(path).head
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    assert verify(path).records == 4
    with pytest.raises(ArtifactError, match="cut off"):
        verify(path, head)


def test_second_writer_is_refused(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "a")
    with pytest.raises(UsageError, match="another process"):
        AuditLog(tmp_path / "a")
    log.close()
    AuditLog(tmp_path / "a").close()


def test_file_that_cannot_be_opened_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for path in (tmp_path, tmp_path / "no" / "a", tmp_path / "link"):
        with pytest.raises(UsageError):
            AuditLog(path)
    with pytest.raises(UsageError):
        verify(tmp_path / "none")


def test_threads_may_append_together(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "a")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: log.append(who=str(n), action="a", outcome="b", detail=""), range(64)))
    log.close()
    assert verify(tmp_path / "a") == log.chain
    assert log.chain.records == 64
