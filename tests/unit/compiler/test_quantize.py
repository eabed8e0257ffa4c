import dataclasses
from typing import Any

import numpy as np
import pytest

from calstack.compiler.quantize.importing import import_w4, import_w8
from calstack.compiler.quantize.search import search_w4, search_w8
from calstack.graph.blocks import dequantise

RNG = np.random.default_rng(11)


@dataclasses.dataclass
class Stored:
    """Blocks as a GGUF holds them, written field by field."""

    kind: str
    raw: np.ndarray
    shape: tuple[int, int]
    name: str = "w"

    def stored(self) -> np.ndarray:
        return self.raw

    def float32(self) -> np.ndarray:
        return dequantise(self.kind, self.raw, self.shape)


def blocks(kind: str, rows: int = 8, k: int = 96) -> Stored:
    count = rows * k // 32
    d = (RNG.standard_normal(count) * 0.01).astype(np.float16)
    m = (RNG.standard_normal(count) * 0.05).astype(np.float16)
    head = [d.view(np.uint8).reshape(-1, 2)] + ([m.view(np.uint8).reshape(-1, 2)] if kind == "Q4_1" else [])
    body = RNG.integers(0, 256, (count, 32 if kind == "Q8_0" else 16), np.uint8)
    return Stored(kind, np.concatenate([*head, body], axis=1).reshape(rows, -1), (rows, k))


@pytest.mark.parametrize(("kind", "minimum"), [("Q4_1", True), ("Q4_0", False), ("Q4_0", True)])
def test_four_bit_blocks_keep_their_exact_values(kind: str, minimum: bool) -> None:
    stored = blocks(kind)
    codes = import_w4(stored, minimum=minimum)
    assert codes is not None
    assert (codes.minimum is not None) == minimum
    np.testing.assert_array_equal(codes.float32(), stored.float32())


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_blocks_kept_in_eight_bits_keep_their_exact_values(kind: str) -> None:
    stored = blocks(kind)
    codes = import_w8(stored)
    assert codes is not None
    assert codes.codes.dtype == np.int8
    np.testing.assert_array_equal(codes.float32(), stored.float32())


def test_codes_of_q4_1_are_the_files_nibbles_in_ggml_order() -> None:
    stored = blocks("Q4_1", rows=1, k=32)
    codes = import_w4(stored, minimum=True)
    assert codes is not None
    nibbles = stored.raw[0, 4:]
    assert codes.codes[0, 0].tolist() == [int(b) & 15 for b in nibbles] + [int(b) >> 4 for b in nibbles]


def test_forms_that_would_lose_bits_are_not_imported() -> None:
    assert import_w4(blocks("Q4_1"), minimum=False) is None
    assert import_w4(blocks("Q8_0"), minimum=True) is None
    assert import_w8(blocks("Q4_1")) is None
    huge = blocks("Q4_0")
    huge.raw[:, :2] = np.frombuffer(np.float16(20000).tobytes(), np.uint8)
    assert import_w4(huge, minimum=True) is None


def error(weight: np.ndarray, value: np.ndarray) -> float:
    return float(((value - weight) ** 2).sum() / (weight**2).sum())


def plain_affine(weight: np.ndarray) -> Any:
    x = weight.reshape(-1, 32)
    low, d = x.min(1, keepdims=True), (x.max(1, keepdims=True) - x.min(1, keepdims=True)) / 15
    return (np.rint((x - low) / d) * d + low).reshape(weight.shape)


def plain_symmetric(weight: np.ndarray) -> Any:
    x = weight.reshape(-1, 32)
    d = np.abs(x).max(1, keepdims=True) / 7
    return (np.clip(np.rint(x / d), -8, 7) * d).reshape(weight.shape)


@pytest.mark.parametrize("spread", ["normal", "outliers"])
def test_search_beats_plain_rounding_by_far(spread: str) -> None:
    weight = RNG.standard_normal((64, 256)).astype(np.float32) * 0.02
    if spread == "outliers":
        weight[RNG.random(weight.shape) < 0.01] *= 6
    affine, symmetric = (search_w4(weight, group=32, minimum=minimum).float32() for minimum in (True, False))
    assert error(weight, affine) < 0.85 * error(weight, plain_affine(weight))
    assert error(weight, symmetric) < 0.8 * error(weight, plain_symmetric(weight))
    assert error(weight, search_w8(weight, group=32).float32()) < 1e-4


def test_no_single_group_is_worse_than_plain_rounding_beyond_f16() -> None:
    weight = RNG.standard_normal((64, 256)).astype(np.float32)
    found = ((search_w4(weight, group=32, minimum=True).float32() - weight).reshape(-1, 32) ** 2).sum(1)
    plain = ((plain_affine(weight) - weight).reshape(-1, 32) ** 2).sum(1)
    assert (found <= plain * 1.01).all()


def test_values_that_fill_a_grid_are_met_exactly() -> None:
    scale, low = np.float32(np.float16(0.013)), np.float32(np.float16(-0.07))
    codes = RNG.integers(0, 16, (32, 64)).astype(np.float32)
    codes[:, [0, 32]], codes[:, [1, 33]] = 0, 15
    weight = codes * scale + low
    np.testing.assert_allclose(search_w4(weight, group=32, minimum=True).float32(), weight, rtol=0, atol=2e-9)


@pytest.mark.parametrize("minimum", [True, False])
@pytest.mark.parametrize("weight", [np.zeros((4, 64)), np.full((4, 64), 0.5), np.full((4, 64), -3e-9), np.full((4, 64), 1e6)])
def test_groups_without_spread_stay_finite(weight: np.ndarray, minimum: bool) -> None:
    for codes in (search_w4(weight.astype(np.float32), group=32, minimum=minimum), search_w8(weight.astype(np.float32), group=32)):
        assert np.isfinite(codes.float32()).all()
    if weight.max() < 1:
        found = search_w4(weight.astype(np.float32), group=32, minimum=minimum).float32()
        np.testing.assert_allclose(found, weight, rtol=2e-3, atol=1e-7)


def test_search_gives_the_same_codes_every_time_and_for_any_cut_into_rows() -> None:
    weight = RNG.standard_normal((300, 512)).astype(np.float32)
    whole, again, top = (search_w4(w, group=32, minimum=True) for w in (weight, weight, weight[:100]))
    np.testing.assert_array_equal(whole.codes, again.codes)
    np.testing.assert_array_equal(whole.scale, again.scale)
    np.testing.assert_array_equal(whole.codes[:100], top.codes)
