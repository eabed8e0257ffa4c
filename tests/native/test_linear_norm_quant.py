"""norm_rows and quant_rows: every instruction set against the scalar reference bit for bit, the reference against f64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native.linear_support import ISAS, kernels, random_rows, same_bits

pytestmark = pytest.mark.native


def norm_weight(rng, n):
    return rng.uniform(0.2, 2.0, n).astype(np.float32)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("n", [1, 15, 16, 17, 33, 100, 576, 1536])
def test_norm_is_bit_equal_on_every_tail(isa, n):
    rng = np.random.default_rng(n)
    x = rng.standard_normal((3, n)).astype(np.float32) * np.float32(3)
    weight = norm_weight(rng, n)
    same_bits(kernels.norm_rows(isa, x, weight, 1e-5), kernels.norm_rows("reference", x, weight, 1e-5))
    same_bits(kernels.norm_rows(isa, x), x)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("k", "group"), [(32, 32), (96, 32), (128, 64), (384, 128), (576, 32), (1536, 64)])
@pytest.mark.parametrize("normed", [False, True])
def test_quantised_rows_are_bit_equal(isa, k, group, normed):
    rng = np.random.default_rng(k)
    x = random_rows(rng, 9, k, group)
    weight = norm_weight(rng, k) if normed else None
    for ours, theirs in zip(
        kernels.quant_rows(isa, x, weight, 1e-5, group), kernels.quant_rows("reference", x, weight, 1e-5, group), strict=True
    ):
        same_bits(ours, theirs)


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 5),
    groups=st.integers(1, 9),
    group=st.sampled_from([32, 64, 128]),
    exponent=st.integers(-45, 30),
    seed=st.integers(0, 999),
)
def test_quantised_rows_are_bit_equal_at_any_magnitude(isa, rows, groups, group, exponent, seed):
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((rows, groups * group)) * 10.0**exponent).astype(np.float32)
    for ours, theirs in zip(kernels.quant_rows(isa, x, group=group), kernels.quant_rows("reference", x, group=group), strict=True):
        same_bits(ours, theirs)


@pytest.mark.parametrize("isa", ["reference", *ISAS])
def test_groups_below_the_threshold_are_all_zero(isa):
    x = np.full((1, 64), 2.0**-101, np.float32)
    x[0, 40] = np.float32(2.0**-100)
    codes, scale, asum, isum = kernels.quant_rows(isa, x)
    assert not codes[0, :32].any()
    assert scale[0, 0] == asum[0, 0] == isum[0, 0] == 0
    assert codes[0, 40] == 127
    assert scale[0, 1] > 0


def test_reference_norm_agrees_with_f64():
    rng = np.random.default_rng(1)
    x, weight = rng.standard_normal((4, 577)).astype(np.float32), norm_weight(rng, 577)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(kernels.norm_rows("reference", x, weight, 1e-5), expected, rtol=2e-6)


def test_reference_codes_are_within_half_a_step_and_their_sums_exact():
    rng = np.random.default_rng(1)
    x = rng.standard_normal((4, 576)).astype(np.float32)
    codes, scale, asum, isum = kernels.quant_rows("reference", x)
    steps = np.repeat(scale.astype(np.float64), 32, axis=1)
    assert (np.abs(codes * steps - x) <= steps * 0.5001).all()
    assert (np.abs(codes.reshape(4, 18, 32)).max(axis=2) == 127).all()
    np.testing.assert_array_equal(isum, codes.reshape(4, 18, 32).sum(axis=2, dtype=np.int32))
    np.testing.assert_array_equal(asum, scale * isum.astype(np.float32))
