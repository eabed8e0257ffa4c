from pathlib import Path

import pytest

from calstack.calbin.reader import open_calbin
from calstack.calbin.writer import CalbinWriter
from calstack.errors import UsageError
from tests.support.calbins import edit_manifest, program, write_calbin


def contents(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def test_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    assert contents(write_calbin(tmp_path / "a")) == contents(write_calbin(tmp_path / "b"))


def test_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail() -> None:
        with CalbinWriter(tmp_path / "m") as writer:
            writer.add("tokenizer.json", b"{}")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_sealing_leaves_only_the_calbin(tmp_path: Path) -> None:
    write_calbin(tmp_path / "m")
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_existing_calbin_is_kept_unless_replaced(tmp_path: Path) -> None:
    path = write_calbin(tmp_path / "m")
    edit_manifest(path, version="old")
    with pytest.raises(UsageError, match="exists"):
        write_calbin(path)
    assert open_calbin(path).manifest.version == "old"
    write_calbin(path, replace=True)
    assert open_calbin(path).manifest.version == "0.1.0"
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_directory_that_is_no_calbin_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match="not a calbin"):
        CalbinWriter(tmp_path / "m", replace=True)
    assert (tmp_path / "m" / "thesis.tex").exists()


def test_program_is_written_one_call_a_line(tmp_path: Path) -> None:
    path = write_calbin(tmp_path / "m")
    lines = next((path / "programs").iterdir()).read_text().splitlines()
    assert sum('"op":' in line for line in lines) == len(program().streams[0])
    assert all(line.count('"op":') <= 1 for line in lines)
