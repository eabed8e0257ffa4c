"""linear_q, linear_f and embed_rows: every instruction set against the scalar reference bit for bit, the reference against f64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native.linear_support import GROUPED, ISAS, gated_order, kernels, random_rows, random_weight, same_bits

pytestmark = pytest.mark.native

Q_FORMATS = [("w4a8", True), ("w4a8", False), ("w8a8", False)]
F_FORMATS = [("w4a16", True), ("w4a16", False), ("bf16", False), ("f16", False), ("f32", False)]
GUARD = np.float32(-77.0)


def run(isa, weight, x, n, *, bias=None, epilogue="store", act="silu", order=None, blocks=None, before=None):
    """out [rows, columns + 3]: three guard columns show a write past the end."""
    columns = n // 2 if epilogue == "gated" else n
    out = np.full((len(x), columns + 3), GUARD, np.float32)
    if before is not None:
        out[:, :columns] = before
    packed = weight.native(order)
    more = {"bias": bias, "epilogue": epilogue, "act": act, "blocks": blocks}
    if weight.format in ("w4a8", "w8a8"):
        kernels.linear_q(isa, packed, *kernels.quant_rows("reference", x, group=weight.group), out, **more)
    else:
        kernels.linear_f(isa, packed, x, out, **more)
    assert (out[:, columns:] == GUARD).all(), "wrote past the last column"
    return out[:, :columns]


def both(isa, *args, **more):
    same_bits(run(isa, *args, **more), run("reference", *args, **more))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("fmt", "minimum"), Q_FORMATS + F_FORMATS)
@pytest.mark.parametrize("rows", [*range(1, 14), 16, 23, 24, 25, 33])
def test_linear_is_bit_equal_for_every_number_of_rows(isa, fmt, minimum, rows):
    rng = np.random.default_rng(rows)
    weight = random_weight(rng, fmt, 40, 96, 32, minimum)
    both(isa, weight, random_rows(rng, rows, 96), 40)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("fmt", "minimum"), Q_FORMATS + F_FORMATS)
@pytest.mark.parametrize(("n", "k", "group"), [(1, 32, 32), (17, 64, 64), (31, 384, 128), (48, 576, 64), (16, 1536, 32), (100, 1536, 128)])
def test_linear_is_bit_equal_on_odd_sizes_and_groups(isa, fmt, minimum, n, k, group):
    rng = np.random.default_rng(n)
    weight = random_weight(rng, fmt, n, k, group, minimum)
    for rows in (1, 5, 14):
        both(isa, weight, random_rows(rng, rows, k, group), n)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("fmt", "minimum"), Q_FORMATS + F_FORMATS)
@pytest.mark.parametrize("epilogue", ["store", "residual", "gated", "activated"])
@pytest.mark.parametrize("n", [64, 70])
def test_epilogues_are_bit_equal(isa, fmt, minimum, epilogue, n):
    rng = np.random.default_rng(n)
    weight = random_weight(rng, fmt, n, 64, 32, minimum)
    order = gated_order(n) if epilogue == "gated" else None
    before = rng.standard_normal((7, n)).astype(np.float32) if epilogue == "residual" else None
    for act in ("silu", "gelu_tanh", "gelu", "tanh") if epilogue in {"gated", "activated"} else ("silu",):
        for bias in (None, rng.standard_normal(128).astype(np.float32)):
            both(isa, weight, random_rows(rng, 7, 64), n, bias=bias, epilogue=epilogue, act=act, order=order, before=before)


@pytest.mark.parametrize("isa", ["reference", *ISAS])
@pytest.mark.parametrize(("fmt", "minimum"), [("w4a8", True), ("f32", False)])
def test_a_range_of_blocks_writes_its_columns_only(isa, fmt, minimum):
    rng = np.random.default_rng(3)
    weight = random_weight(rng, fmt, 80, 64, 32, minimum)
    x = random_rows(rng, 3, 64)
    whole, part = run(isa, weight, x, 80), run(isa, weight, x, 80, blocks=(1, 3))
    same_bits(part[:, 16:48], whole[:, 16:48])
    assert (np.delete(part, np.s_[16:48], axis=1) == GUARD).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("fmt", ["w4a8", "w8a8"])
def test_extreme_codes_do_not_saturate(isa, fmt):
    """All codes at their ends against all activations at theirs: 16-bit intermediate sums would overflow."""
    rng = np.random.default_rng(0)
    weight = random_weight(rng, fmt, 32, 128, 128, minimum=False)
    low, high = (-128, 127) if fmt == "w8a8" else (0, 15)
    for code in (low, high):
        weight.codes[:] = code
        for value in (-1.0, 1.0):
            both(isa, weight, np.full((3, 128), value, np.float32), 32)


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 33),
    n=st.integers(1, 70),
    groups=st.integers(1, 6),
    group=st.sampled_from([32, 64, 128]),
    kind=st.sampled_from(Q_FORMATS + F_FORMATS),
    seed=st.integers(0, 2**16),
)
def test_linear_is_bit_equal_on_random_shapes(isa, rows, n, groups, group, kind, seed):
    rng = np.random.default_rng(seed)
    weight = random_weight(rng, kind[0], n, groups * group, group, kind[1])
    both(isa, weight, random_rows(rng, rows, groups * group, group), n)


@pytest.mark.parametrize("isa", ["reference", *ISAS])
@pytest.mark.parametrize(("fmt", "minimum"), Q_FORMATS + F_FORMATS)
def test_rows_do_not_depend_on_their_batch(isa, fmt, minimum):
    rng = np.random.default_rng(5)
    weight = random_weight(rng, fmt, 48, 96, 32, minimum)
    x = random_rows(rng, 29, 96)
    together = run(isa, weight, x, 48)
    for row in (0, 13, 28):
        same_bits(run(isa, weight, x[row : row + 1], 48), together[row : row + 1])


@pytest.mark.parametrize(("fmt", "minimum"), F_FORMATS)
def test_reference_of_f32_products_agrees_with_f64(fmt, minimum):
    rng = np.random.default_rng(9)
    weight = random_weight(rng, fmt, 50, 256, 64, minimum)
    x = rng.standard_normal((5, 256)).astype(np.float32)
    expected = x.astype(np.float64) @ weight.f64().T
    np.testing.assert_allclose(run("reference", weight, x, 50), expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize(("fmt", "minimum"), Q_FORMATS)
def test_reference_of_int8_products_agrees_with_f64(fmt, minimum):
    rng = np.random.default_rng(9)
    weight = random_weight(rng, fmt, 50, 256, 64, minimum)
    x = rng.standard_normal((5, 256)).astype(np.float32)
    codes, scale, _, _ = kernels.quant_rows("reference", x, group=64)
    rounded = codes.astype(np.float64) * np.repeat(scale.astype(np.float64), 64, axis=1)
    expected = rounded @ weight.f64().T
    np.testing.assert_allclose(run("reference", weight, x, 50), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_reference_epilogues_agree_with_f64():
    rng = np.random.default_rng(11)
    weight = random_weight(rng, "f32", 64, 32)
    x, bias = rng.standard_normal((4, 32)).astype(np.float32), rng.standard_normal(64).astype(np.float32)
    plain = x.astype(np.float64) @ weight.f64().T
    before = rng.standard_normal((4, 64)).astype(np.float32)
    np.testing.assert_allclose(run("reference", weight, x, 64, bias=bias), plain + bias, atol=1e-5)
    np.testing.assert_allclose(run("reference", weight, x, 64, epilogue="residual", before=before), before + plain, atol=1e-5)
    gate, up = plain[:, :32], plain[:, 32:]
    gated = run("reference", weight, x, 64, epilogue="gated", order=gated_order(64))
    np.testing.assert_allclose(gated, gate / (1 + np.exp(-gate)) * up, atol=1e-5)


def f64_gelu(x):
    from math import erf

    return x * 0.5 * (1 + np.vectorize(erf)(x / np.sqrt(2)))


def f64_gelu_tanh(x):
    return x * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("isa", ["reference", *ISAS])
@pytest.mark.parametrize(("act", "exact"), [("silu", lambda x: x / (1 + np.exp(-x))), ("gelu_tanh", f64_gelu_tanh), ("gelu", f64_gelu)])
def test_activations_agree_with_f64_and_bit_for_bit(isa, act, exact):
    """An identity gate and an up of ones show the activation itself, also far outside the range of exp."""
    x = np.concatenate([np.linspace(-12, 12, 4001), np.linspace(-200, 200, 801)]).astype(np.float32).reshape(-1, 1)
    weight = random_weight(np.random.default_rng(0), "f32", 2, 1)
    weight.values[:] = [[1.0], [0.0]]
    bias = np.zeros(32, np.float32)
    bias[16] = 1.0
    out = run(isa, weight, x, 2, bias=bias, epilogue="gated", act=act, order=gated_order(2))
    np.testing.assert_allclose(out, exact(x.astype(np.float64)), rtol=1e-6, atol=4e-7)
    same_bits(out, run("reference", weight, x, 2, bias=bias, epilogue="gated", act=act, order=gated_order(2)))


@pytest.mark.parametrize("isa", ["reference", *ISAS])
@pytest.mark.parametrize(("fmt", "minimum"), Q_FORMATS + F_FORMATS)
@pytest.mark.parametrize("scale", [1.0, 24.0])
def test_embedding_rows_are_bit_equal_and_right(isa, fmt, minimum, scale):
    rng = np.random.default_rng(2)
    weight = random_weight(rng, fmt, 45, 192, 64, minimum)
    ids = np.array([0, 44, 17, 16, 17], np.int32)
    rows = kernels.embed_rows(isa, weight.native(), ids, scale)
    same_bits(rows, kernels.embed_rows("reference", weight.native(), ids, scale))
    np.testing.assert_allclose(rows, weight.f64()[ids] * scale, rtol=1e-6, atol=1e-7 if fmt in GROUPED else 0)


def test_a_weight_shorter_than_its_shape_is_refused():
    weight = random_weight(np.random.default_rng(0), "w4a8", 32, 64, 32, minimum=True)
    with pytest.raises(ValueError, match="too short"):
        kernels.Weight(weight.packed()[:-1], "w4a8", 32, 64, 32, True)
