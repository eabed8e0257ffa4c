from __future__ import annotations

import numpy as np
import pytest

from calstack.graph import blocks


def by_hand(kind: str, block: bytes) -> list[float]:
    """One block's values, one by one, as the format is defined."""
    head = np.frombuffer(block[:4], np.float16).astype(np.float32)
    if kind == "Q8_0":
        return [float(head[0] * np.float32(q)) for q in np.frombuffer(block[2:], np.int8)]
    raw = block[2:] if kind == "Q4_0" else block[4:]
    codes = [byte & 15 for byte in raw] + [byte >> 4 for byte in raw]
    if kind == "Q4_0":
        return [float(head[0] * np.float32(q - 8)) for q in codes]
    return [float(np.float32(head[0] * np.float32(q)) + head[1]) for q in codes]


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_blocks_decode_as_defined(kind: str) -> None:
    size = blocks.KINDS[kind].bytes
    rng = np.random.default_rng(3)
    raw = rng.integers(0, 256, (5, 3 * size), np.uint8)
    scales = rng.normal(size=(5, 3, 2)).astype(np.float16).view(np.uint8).reshape(5, 3, 4)
    for group in range(3):
        width = 4 if kind == "Q4_1" else 2
        raw[:, group * size : group * size + width] = scales[:, group, :width]
    want = [[v for g in range(3) for v in by_hand(kind, row[g * size : (g + 1) * size].tobytes())] for row in raw]
    assert np.array_equal(blocks.dequantise(kind, raw, (5, 96)), np.array(want, np.float32))


def test_long_tensors_are_decoded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = np.random.default_rng(4).integers(0, 120, (50, 2 * 34), np.uint8)
    whole = blocks.dequantise("Q8_0", raw, (50, 64))
    monkeypatch.setattr(blocks, "_ROWS_AT_ONCE", 64 * 7)
    assert np.array_equal(blocks.dequantise("Q8_0", raw, (50, 64)), whole)


@pytest.mark.parametrize("kind", blocks.KINDS)
def test_a_dequantised_tensor_is_new_memory(kind: str) -> None:
    raw = np.zeros((2, blocks.KINDS[kind].row_bytes(256)), np.uint8)
    raw.flags.writeable = False
    values = blocks.dequantise(kind, raw, (2, 256))
    assert values.flags.writeable
    assert values.dtype == np.float32


def test_a_row_of_broken_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="33 values"):
        blocks.KINDS["Q4_0"].row_bytes(33)
