"""Rope tables, q/k norm, rope and the KV write: against the scalar reference bit for bit, the reference against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native.attention_support import DTYPES, ISAS, POISON, SIZES, Case, Lane, floats, kernels, positions_of, same_bits, stored

pytestmark = pytest.mark.native

ALL = ["reference", *ISAS]
EPS = float(np.float32(1e-5))


def frequencies(half, theta=10000.0):
    return (theta ** (-np.arange(half) / half)).astype(np.float32)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("half", [1, 4, 5, 8, 16, 20, 32, 64, 128])
@pytest.mark.parametrize("factor", [1.0, 1.1386])
def test_rope_table_equals_reference(isa, half, factor):
    positions = np.array([0, 1, 2, 3, 7, 100, 1023, 8191, 131071, 2**24 + 1, 2**31 - 1], np.int32)
    inv_freq = frequencies(half)
    same_bits(kernels.rope_table(isa, inv_freq, positions, factor), kernels.rope_table("reference", inv_freq, positions, factor))


@pytest.mark.parametrize("isa", ALL)
def test_rope_table_is_the_cosine_and_sine_of_the_f32_angle(isa):
    positions = np.arange(0, 200_000, 37, dtype=np.int32)
    inv_freq = frequencies(32)
    angle = (positions[:, None].astype(np.float32) * inv_freq).astype(np.float64)
    got = kernels.rope_table(isa, inv_freq, positions)
    want = np.concatenate([np.cos(angle), np.sin(angle)], axis=1)
    assert np.abs(got - want).max() <= 2.0**-24  # half a unit in the last place of 1


def step(isa, case, x, *, table=None, q_norm=None, k_norm=None):
    """The changed rows and all bytes of the cache."""
    lane = Lane(case, np.random.default_rng(0))
    qkv = x.copy()
    lanes = np.zeros(case.rows, np.int32)
    kernels.qk_norm_rope_kv(isa, lane.cache, qkv, lanes, positions_of(case), table, q_norm, k_norm, EPS)
    return qkv, lane


def arguments(case, rng, norm, rope_dim):
    x = rng.standard_normal((case.rows, case.row_floats), np.float32)
    table = kernels.rope_table("reference", frequencies(rope_dim // 2), positions_of(case)) if rope_dim else None
    weights = [rng.standard_normal(case.dim, np.float32) for _ in range(2)] if norm else [None, None]
    return x, {"table": table, "q_norm": weights[0], "k_norm": weights[1]}


@settings(max_examples=80, deadline=None)
@given(
    isa=st.sampled_from(ISAS),
    past=st.integers(0, 200),
    rows=st.integers(1, 40),
    dim=st.sampled_from([8, 16, 24, 32, 40, 64, 80, 96, 128, 256]),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    kv=st.sampled_from(list(SIZES)),
    norm=st.booleans(),
    rope=st.sampled_from(["none", "half", "whole"]),
    seed=st.integers(0, 2**32),
)
def test_random_step_equals_reference(isa, past, rows, dim, kv_heads, group, kv, norm, rope, seed):
    case = Case(past, rows, dim, kv_heads * group, kv_heads, kv)
    x, more = arguments(case, np.random.default_rng(seed), norm, {"none": 0, "half": dim // 2, "whole": dim}[rope])
    got, cache = step(isa, case, x, **more)
    want, want_cache = step("reference", case, x, **more)
    same_bits(got, want)
    np.testing.assert_array_equal(cache.blocks, want_cache.blocks)


@pytest.mark.parametrize("kv", list(SIZES))
def test_reference_step_equals_numpy(kv):
    case = Case(past=60, rows=10, dim=24, heads=4, kv_heads=2, kv=kv)
    x, more = arguments(case, np.random.default_rng(1), norm=True, rope_dim=16)
    got, lane = step("reference", case, x, **more)
    heads = x.reshape(case.rows, -1, case.dim).astype(np.float64)
    want = heads.copy()
    for h in range(case.heads + case.kv_heads):
        weight = more["q_norm"] if h < case.heads else more["k_norm"]
        y = heads[:, h] / np.sqrt((heads[:, h] ** 2).mean(1, keepdims=True) + EPS) * weight
        a, b, c, s = y[:, :8], y[:, 8:16], more["table"][:, :8], more["table"][:, 8:]
        want[:, h] = np.concatenate([a * c - b * s, b * c + a * s, y[:, 16:]], axis=1)
    q, k, v = np.split(want, [case.heads, case.heads + case.kv_heads], axis=1)
    np.testing.assert_allclose(got.reshape(want.shape)[:, : case.heads], q, atol=2e-6)
    for row, position in enumerate(positions_of(case)):
        k_tolerance = {"f32": 2e-6, "i8": 2e-2}.get(kv, 1e-2)
        np.testing.assert_allclose(lane.get(position)[0], k[row], rtol=k_tolerance, atol=k_tolerance)
        values = v[row].astype(np.float32)
        np.testing.assert_array_equal(lane.get(position)[1], floats(*stored(values, DTYPES[SIZES[kv][1]])))


@pytest.mark.parametrize("isa", ALL)
def test_write_touches_only_its_positions(isa):
    case = Case(past=60, rows=6, dim=16, heads=2, kv_heads=1)
    x, more = arguments(case, np.random.default_rng(2), norm=False, rope_dim=16)
    _, lane = step(isa, case, x, **more)
    written = case.rows * 2 * case.kv_heads * case.dim * 2
    assert (lane.blocks != POISON).sum() <= written
    for position in (59, 66):
        assert np.isnan(np.concatenate(lane.get(position))).all()
    assert (lane.blocks[:, : -lane.layer_bytes] == POISON).all()


@pytest.mark.parametrize("isa", ALL)
def test_rows_of_several_lanes_go_to_their_own_blocks(isa):
    case = Case(past=0, rows=2, dim=16, heads=1, kv_heads=1, kv="f32")
    blocks = np.zeros((2, 2 * 16 * 64 * 4), np.uint8)
    cache = kernels.Cache(blocks, np.array([[1], [0]], np.int32), "f32", 1, 1, 16)
    x = np.random.default_rng(3).standard_normal((2, case.row_floats), np.float32)
    kernels.qk_norm_rope_kv(isa, cache, x, np.array([0, 1], np.int32), np.array([5, 9], np.int32))
    v = blocks.view(np.float32).reshape(2, 2, 64, 16)[:, 1]
    np.testing.assert_array_equal(v[1, 5], x[0, 32:])
    np.testing.assert_array_equal(v[0, 9], x[1, 32:])
