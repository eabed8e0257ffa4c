from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from calstack.errors import SourceError, UnsupportedError
from calstack.frontends.safetensors import read_safetensors


def written(path: Path, header: Any, data: bytes = b"", *, size: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if size is None else size) + raw + data)
    return path


def entry(dtype: Any = "F32", shape: Any = (2, 2), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_a_file_of_the_library_is_read(tmp_path: Path) -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4) / 7
    save_file({"a": values, "b": values.astype(np.float16)}, tmp_path / "x.safetensors", metadata={"format": "pt"})
    tensors = read_safetensors(tmp_path / "x.safetensors")
    assert np.array_equal(tensors["a"].float32(), values)
    assert np.array_equal(tensors["b"].float32(), values.astype(np.float16).astype(np.float32))
    assert (tensors["a"].kind, tensors["b"].kind, tensors["b"].shape) == ("F32", "F16", (3, 4))


def test_bf16_is_read_exactly(tmp_path: Path) -> None:
    values = np.linspace(-3, 3, 8, dtype=np.float32).astype(ml_dtypes.bfloat16)
    path = written(tmp_path / "x", {"a": entry("BF16", (8,), (0, 16))}, values.tobytes())
    assert np.array_equal(read_safetensors(path)["a"].float32(), values.astype(np.float32))


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{", b"", "not valid JSON"),
        (b"[]", b"", "not a JSON object"),
        (b"\xff\xfe", b"", "not valid JSON"),
        (b"[" * 100_000, b"", "not valid JSON"),
        (b'{"a": 1, "a": 2}', b"", "twice"),
        ({"a": 1}, b"", "'a'"),
        ({"a": {"dtype": "F32"}}, b"", "'a'"),
        ({"a": entry("F33")}, bytes(16), "unknown dtype"),
        ({"a": entry(shape=[2, -2])}, bytes(16), "shape"),
        ({"a": entry(shape=[True, 4])}, bytes(16), "shape"),
        ({"a": entry(shape=[1 << 61, 8], offsets=[0, 1 << 61])}, bytes(16), "the shape needs"),
        ({"a": entry(shape=[1.5])}, bytes(16), "shape"),
        ({"a": entry(shape=[0], offsets=[0, 0])}, b"", "shape"),
        ({"a": entry(offsets=[16, 0])}, bytes(16), "data_offsets"),
        ({"a": entry(offsets=[0, 12])}, bytes(16), "the shape needs 16"),
        ({"a": entry(offsets=[16, 32])}, bytes(16), "the file at"),
        ({"a": entry(offsets=[16, 32])}, bytes(32), "gap"),
        ({"a": entry(), "b": entry()}, bytes(16), "overlap"),
        ({"a": entry()}, bytes(20), "oversized"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, header: Any, data: bytes, message: str) -> None:
    with pytest.raises(SourceError, match=message) as caught:
        read_safetensors(written(tmp_path / "x", header, data))
    assert "\n" not in caught.value.line()


@pytest.mark.parametrize("size", [0, 1 << 20, (1 << 64) - 1])
def test_a_header_length_that_does_not_fit_is_refused(tmp_path: Path, size: int) -> None:
    with pytest.raises(SourceError, match="header"):
        read_safetensors(written(tmp_path / "x", {"a": entry()}, bytes(16), size=size))


@pytest.mark.parametrize("data", [b"", b"abc"])
def test_a_file_without_a_header_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(SourceError, match=r"empty|shorter"):
        read_safetensors(tmp_path / "x")


def test_another_dtype_is_unsupported_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"'a'.*F8_E4M3"):
        read_safetensors(written(tmp_path / "x", {"a": entry("F8_E4M3", (16,))}, bytes(16)))
