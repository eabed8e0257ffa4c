from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from calstack.calbin.shard import PAGE, Shard, ShardWriter, padded
from calstack.errors import ArtifactError


def write(path: Path, **tensors: np.ndarray) -> Path:
    with path.open("wb") as file:
        writer = ShardWriter(file, [(name, data.nbytes) for name, data in tensors.items()])
        for name, data in tensors.items():
            writer.add(name, data)
        nbytes, _ = writer.finish()
    assert nbytes == path.stat().st_size
    return path


@pytest.fixture
def shard_path(tmp_path: Path) -> Path:
    return write(tmp_path / "s.safetensors", a=np.arange(5, dtype=np.uint8), b=np.full(PAGE + 1, 9, np.uint8), c=np.ones(PAGE, np.uint8))


def test_tensors_come_back_and_start_on_pages(shard_path: Path) -> None:
    shard = Shard(shard_path)
    assert shard.names() == ("a", "b", "c")
    assert shard.tensor("a", 5).tolist() == [0, 1, 2, 3, 4]
    assert (shard.tensor("b", PAGE + 1) == 9).all()
    assert all(shard.range(name)[0] % PAGE == 0 for name in shard.names())
    assert [shard.range(name)[1] for name in shard.names()] == [PAGE, 2 * PAGE, PAGE]


def test_padding_is_inside_a_tensors_range_so_that_other_readers_take_the_file(shard_path: Path) -> None:
    others = load_file(shard_path)
    assert {name: value.shape for name, value in others.items()} == {"a": (PAGE,), "b": (2 * PAGE,), "c": (PAGE,)}
    assert others["a"][:5].tolist() == [0, 1, 2, 3, 4]
    assert not others["a"][5:].any()


def test_tensor_view_cannot_be_written(shard_path: Path) -> None:
    with pytest.raises(ValueError, match="read-only"):
        Shard(shard_path).tensor("a", 5)[0] = 1


def header(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b'"U8"', b'"I8"', "U8"),
        (b"[4096]", b"[4097]", "shape"),
        (b"[4096,12288]", b"[4097,12288]", "byte range"),
        (b"[12288,16384]", b"[12289,16385]", "follow each other"),
        (b'"b"', b'"a"', "follow each other"),
        (b'"data_offsets"', b'"data-offsets"', "not valid"),
        (b'{"a"', b'["a"', "not valid"),
    ],
)
def test_header_that_breaks_a_rule_is_refused(shard_path: Path, old: bytes, new: bytes, said: str) -> None:
    header(shard_path, old, new)
    with pytest.raises(ArtifactError, match=said) as caught:
        Shard(shard_path)
    assert "s.safetensors" in str(caught.value)


@pytest.mark.parametrize("length", [1 << 62, 1 << 40, 20473])
def test_header_longer_than_the_file_is_refused_without_reading_it(shard_path: Path, length: int) -> None:
    data = bytearray(shard_path.read_bytes())
    data[:8] = length.to_bytes(8, "little")
    shard_path.write_bytes(data)
    with pytest.raises(ArtifactError, match="claims"):
        Shard(shard_path)


@pytest.mark.parametrize("size", [0, 7, 4095, 4096, 4097, 12000])
def test_truncated_file_is_refused(shard_path: Path, size: int) -> None:
    shard_path.write_bytes(shard_path.read_bytes()[:size])
    with pytest.raises(ArtifactError):
        Shard(shard_path)


def test_data_behind_the_last_tensor_is_refused(shard_path: Path) -> None:
    with shard_path.open("ab") as file:
        file.write(bytes(PAGE))
    with pytest.raises(ArtifactError, match="covers"):
        Shard(shard_path)


@pytest.mark.parametrize(("nbytes", "pages"), [(1, 1), (4095, 1), (4096, 1), (4097, 2)])
def test_padded_rounds_up_to_pages(nbytes: int, pages: int) -> None:
    assert padded(nbytes) == pages * PAGE
