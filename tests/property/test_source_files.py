"""Whatever happens to a source file, the answer is a bundle or one line; never another exception, never much memory."""

from __future__ import annotations

import functools
import json
import shutil
import struct
import tempfile
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from calstack.errors import SourceError, UnsupportedError
from calstack.frontends import open_source
from calstack.frontends.gguf import read_gguf
from calstack.frontends.onnx_dir import keep_onnx
from calstack.frontends.safetensors import read_safetensors
from tests.support.gguf_files import DATA, write_tiny_gguf

MOST_BYTES = 48 << 20  # Python's share of opening a tiny model, tokenizer included
EDGES = [0, 1, 0x7F, 0x80, 0xFF]
WORDS = [0, 1, 31, 32, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 62) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]

bounded = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
dear = settings(bounded, max_examples=40)  # opens a whole directory each time


@functools.cache
def gguf() -> tuple[bytes, int]:
    """A small GGUF file, and where its header ends."""
    with tempfile.TemporaryDirectory() as directory:
        path = write_tiny_gguf(Path(directory) / "m.gguf", "tiny-llama", "Q4_0")
        data = path.read_bytes()
        return data, min(entry.offset for entry in read_gguf(path).tensors.values())


@functools.cache
def safetensors() -> tuple[bytes, int]:
    """A safetensors file, and where its header ends."""
    data = (DATA / "tiny-llama/model.safetensors").read_bytes()
    return data, 8 + struct.unpack_from("<Q", data)[0]


@contextmanager
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


@contextmanager
def refused_in_one_line(path: Path, *, watch_memory: bool = True) -> Iterator[None]:
    try:
        with little_memory() if watch_memory else nullcontext():
            yield
    except (SourceError, UnsupportedError) as error:
        line = error.line()
        assert "\n" not in line
        assert str(path) in line
        assert len(line) < 1200


def try_open(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "m.gguf"
        path.write_bytes(data)
        with refused_in_one_line(path):
            open_source(path)


def try_read(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "m.safetensors"
        path.write_bytes(data)
        with refused_in_one_line(path):
            for tensor in read_safetensors(path).values():
                assert tensor.float32().shape == tensor.shape


def test_the_unchanged_files_open() -> None:
    try_open(gguf()[0])
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "m.gguf"
        path.write_bytes(gguf()[0])
        assert open_source(path).spec.layers == 3


@bounded
@given(st.data())
def test_gguf_with_header_bytes_changed(data: st.DataObject) -> None:
    content, header = gguf()
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, header - 1))] = data.draw(st.sampled_from(EDGES) | st.integers(0, 255))
    try_open(bytes(changed))


@bounded
@given(st.data())
def test_gguf_with_a_count_or_length_changed(data: st.DataObject) -> None:
    content, header = gguf()
    changed = bytearray(content)
    struct.pack_into("<Q", changed, data.draw(st.integers(0, header - 8)), data.draw(st.sampled_from(WORDS)))
    try_open(bytes(changed))


@bounded
@given(st.integers(0, 1 << 20), st.binary(max_size=64))
def test_gguf_cut_and_continued_with_something_else(cut: int, tail: bytes) -> None:
    content, _ = gguf()
    try_open(content[: cut % len(content)] + tail)


@bounded
@given(st.binary(max_size=300))
@example(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
def test_gguf_of_random_bytes_behind_the_magic(tail: bytes) -> None:
    try_open(b"GGUF\x03\x00\x00\x00" + tail)


@bounded
@given(st.data())
def test_safetensors_with_header_bytes_changed(data: st.DataObject) -> None:
    content, header = safetensors()
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, header - 1))] = data.draw(st.sampled_from(list(b'{}[]",:0129-e.\x00\xff')) | st.integers(0, 255))
    try_read(bytes(changed))


@bounded
@given(st.integers(0, 1 << 20), st.binary(max_size=64))
def test_safetensors_cut_and_continued_with_something_else(cut: int, tail: bytes) -> None:
    content, _ = safetensors()
    try_read(content[: cut % len(content)] + tail)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@dear
@given(st.data())
def test_config_with_a_field_changed(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "m"
        shutil.copytree(DATA / "tiny-qwen3", path)
        name = data.draw(st.sampled_from(["config.json", "generation_config.json", "tokenizer_config.json"]))
        values = json.loads((path / name).read_text())
        values[data.draw(st.sampled_from(sorted(values)))] = data.draw(JSON)
        (path / name).write_text(json.dumps(values))
        with refused_in_one_line(path, watch_memory=False):  # watching makes building the graphs five times slower
            open_source(path)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("onnx") / "kept"
    keep_onnx(open_source(DATA / "tiny-llama"), directory)
    return directory


@dear
@given(data=st.data())
def test_onnx_directory_with_bytes_changed(kept: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["prefill.onnx", "decode.onnx", "index.json"]))
    original = (kept / name).read_bytes()
    changed = bytearray(original)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    try:
        (kept / name).write_bytes(changed)
        with refused_in_one_line(kept):
            for tensor in open_source(kept).tensors.values():
                assert tensor.float32().shape == tensor.shape
    finally:
        (kept / name).write_bytes(original)
