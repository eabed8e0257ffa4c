"""Layer norm and pooling: every instruction set against the scalar reference, the reference against numpy in f64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native.linear_support import ISAS, kernels, same_bits

pytestmark = pytest.mark.native

WIDTHS = st.integers(1, 70) | st.sampled_from([384, 767, 768])


def rows_of(rng: np.random.Generator, rows: int, n: int, *, constant: bool = False) -> np.ndarray:
    x = rng.standard_normal((rows, n)).astype(np.float32) * np.float32(3) + np.float32(1)
    if constant:
        x[:] = x[:, :1]
    return x


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=80, deadline=None)
@given(n=WIDTHS, rows=st.integers(1, 5), constant=st.booleans(), seed=st.integers(0, 9999))
def test_layer_norms_are_bit_equal_on_every_tail(isa: str, n: int, rows: int, constant: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, w, b = rows_of(rng, rows, n, constant=constant), *rows_of(rng, 2, n)
    same_bits(kernels.layer_norm_rows(isa, x, w, b, 1e-12), kernels.layer_norm_rows("reference", x, w, b, 1e-12))


def test_a_layer_norm_is_what_its_name_says() -> None:
    x, (w, b) = rows_of(np.random.default_rng(1), 7, 384), rows_of(np.random.default_rng(2), 2, 384)
    wide = x.astype(np.float64)
    want = (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 1e-12) * w + b
    assert np.abs(kernels.layer_norm_rows("reference", x, w, b, 1e-12) - want).max() < 1e-5


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=80, deadline=None)
@given(n=WIDTHS, rows=st.integers(1, 80), how=st.sampled_from(["mean", "cls"]), normalise=st.booleans(), seed=st.integers(0, 9999))
def test_pooled_rows_are_bit_equal(isa: str, n: int, rows: int, how: str, normalise: bool, seed: int) -> None:
    x = rows_of(np.random.default_rng(seed), rows, n)
    same_bits(kernels.pool_rows(isa, x, how, normalise), kernels.pool_rows("reference", x, how, normalise))


@pytest.mark.parametrize("isa", ["reference", *ISAS])
def test_pooling_of_nothing_but_zeros_is_no_nan(isa: str) -> None:
    assert not kernels.pool_rows(isa, np.zeros((3, 20), np.float32), "mean", True).any()


def test_a_mean_of_length_one_agrees_with_f64() -> None:
    x = rows_of(np.random.default_rng(3), 50, 384)
    mean = x.astype(np.float64).mean(0)
    want = mean / np.linalg.norm(mean)
    assert np.abs(kernels.pool_rows("reference", x, "mean", True)[0] - want).max() < 1e-6
    same_bits(kernels.pool_rows("reference", x, "cls", False)[0], x[0])
