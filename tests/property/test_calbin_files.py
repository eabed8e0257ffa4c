"""A damaged calbin ends in one line, whatever is damaged: never a traceback, never an allocation by an unchecked size."""

import resource
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from calstack.calbin.reader import MANIFEST, open_calbin, verify_files
from calstack.errors import ArtifactError
from tests.support.calbins import KEY, write_calbin

PROGRAM = f"programs/{KEY}.json"
SHARD = "params/chip0.safetensors"
MOST_BYTES = 4 << 20  # a sound open of this calbin takes well under one

Mutation = Callable[[bytes], bytes]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_calbin(tmp_path_factory.mktemp("calbin") / "m.calbin")


def flips(data: bytes, places: list[tuple[float, int]]) -> bytes:
    changed = bytearray(data)
    for at, value in places:
        changed[int(at * (len(data) - 1))] = value
    return bytes(changed)


def inserted(data: bytes, at: float, more: bytes) -> bytes:
    return data[: int(at * len(data))] + more + data[int(at * len(data)) :]


BYTE = st.one_of(st.integers(0, 255), st.sampled_from(list(b'{}[]",:0123456789-e')))
SHARE = st.floats(0, 1, exclude_max=True)
MUTATIONS: st.SearchStrategy[Mutation] = st.one_of(
    st.lists(st.tuples(SHARE, BYTE), min_size=1, max_size=8).map(lambda places: lambda data: flips(data, places)),
    SHARE.map(lambda at: lambda data: data[: int(at * len(data))]),
    st.tuples(SHARE, SHARE).map(lambda cut: lambda data: data[: int(min(cut) * len(data))] + data[int(max(cut) * len(data)) :]),
    st.tuples(SHARE, st.binary(min_size=1, max_size=64)).map(lambda more: lambda data: inserted(data, *more)),
    st.tuples(SHARE, st.sampled_from([b"9" * 30, b"-1", b"[" * 5000, b"1e308", b'"\\ud800"', b"null"])).map(
        lambda more: lambda data: inserted(data, *more)
    ),
)


def open_all(path: Path) -> None:
    """Open and verify under a watch on Python's allocations."""
    tracemalloc.start()
    try:
        verify_files(open_calbin(path))
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MOST_BYTES, f"{peak} bytes were allocated"


def mutated(sound: Path, tmp: Path, name: str, mutation: Mutation) -> bool:
    """Write a damaged copy to `tmp`; False when the damage changed nothing."""
    shutil.rmtree(tmp, ignore_errors=True)
    shutil.copytree(sound, tmp)
    old = (sound / name).read_bytes()
    new = mutation(old)
    (tmp / name).write_bytes(new)
    return new != old


def one_line(error: ArtifactError) -> None:
    line = error.line()
    assert "\n" not in line
    assert error.where
    assert error.remedy
    assert error.exit_code == 2


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from([PROGRAM, SHARD, "tokenizer.json"]), mutation=MUTATIONS)
def test_damage_to_a_listed_file_ends_in_one_line(sound: Path, tmp_path: Path, name: str, mutation: Mutation) -> None:
    if not mutated(sound, tmp_path / "m", name, mutation):
        return
    with pytest.raises(ArtifactError) as caught:
        open_all(tmp_path / "m")
    one_line(caught.value)


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mutation=MUTATIONS)
def test_damage_to_the_manifest_is_harmless_or_ends_in_one_line(sound: Path, tmp_path: Path, mutation: Mutation) -> None:
    mutated(sound, tmp_path / "m", MANIFEST, mutation)
    try:
        open_all(tmp_path / "m")
    except ArtifactError as error:
        one_line(error)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(length=st.integers(0, (1 << 64) - 1))
def test_any_header_length_of_a_shard_ends_in_one_line(sound: Path, tmp_path: Path, length: int) -> None:
    if not mutated(sound, tmp_path / "m", SHARD, lambda data: length.to_bytes(8, "little") + data[8:]):
        return
    with pytest.raises(ArtifactError) as caught:
        open_all(tmp_path / "m")
    one_line(caught.value)


def test_huge_sparse_file_is_refused_by_its_size(sound: Path, tmp_path: Path) -> None:
    mutated(sound, tmp_path / "m", MANIFEST, lambda data: data)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name in (MANIFEST, PROGRAM, SHARD):
        shutil.copyfile(sound / name, tmp_path / "m" / name)
        with (tmp_path / "m" / name).open("r+b") as file:
            file.truncate(8 << 30)
        with pytest.raises(ArtifactError) as caught:
            open_all(tmp_path / "m")
        one_line(caught.value)
        shutil.copyfile(sound / name, tmp_path / "m" / name)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB
