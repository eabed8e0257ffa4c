"""Attention: every instruction set against the scalar reference bit for bit, the reference against f64, rows whatever their company."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native.attention_support import ISAS, POISON, SIZES, Case, attention_f64, filled, kernels, positions_of, run, same_bits

pytestmark = pytest.mark.native

EDGES = [1, 15, 16, 17, 63, 64, 65, 255, 256, 257, 1023, 1024, 1025]
ALL = ["reference", *ISAS]


def both(isa, case, seed=0):
    lane, qkv = filled(case, np.random.default_rng(seed))
    got = run(isa, case, lane, qkv)
    assert np.isfinite(got).all(), "poison beyond the seen keys got into the result"
    same_bits(got, run("reference", case, lane, qkv))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv", list(SIZES))
@pytest.mark.parametrize("context", EDGES)
def test_decode_row_equals_reference_at_tile_and_split_edges(isa, kv, context):
    both(isa, Case(past=context - 1, rows=1, kv=kv))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 16, 33, 65, 100])
@pytest.mark.parametrize("past", [0, 1, 63, 200])
def test_prefill_rows_equal_reference(isa, rows, past):
    both(isa, Case(past=past, rows=rows))
    both(isa, Case(past=past, rows=rows, kv="f32", heads=4, kv_heads=2, dim=32))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dim", [8, 16, 24, 32, 40, 64, 72, 80, 96, 120, 128, 192, 256])
@pytest.mark.parametrize("kv", list(SIZES))
def test_head_dim_equals_reference(isa, dim, kv):
    both(isa, Case(past=70, rows=7, dim=dim, heads=4, kv_heads=2, kv=kv))
    both(isa, Case(past=300, rows=1, dim=dim, heads=4, kv_heads=2, kv=kv))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 100])
def test_group_size_equals_reference(isa, group):
    both(isa, Case(past=90, rows=5, dim=16, heads=group * 2, kv_heads=2))
    both(isa, Case(past=90, rows=1, dim=16, heads=group * 2, kv_heads=2))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 63, 64, 65, 100, 256, 300, 5000])
def test_window_equals_reference(isa, window):
    both(isa, Case(past=0, rows=70, window=window, dim=32, heads=4, kv_heads=2))
    both(isa, Case(past=500, rows=40, window=window, dim=32, heads=4, kv_heads=2))
    both(isa, Case(past=700, rows=1, window=window, dim=32))


@pytest.mark.parametrize("isa", ISAS)
def test_softcap_equals_reference(isa):
    both(isa, Case(past=130, rows=20, softcap=5.0, dim=32))
    both(isa, Case(past=130, rows=1, softcap=5.0, dim=32, window=9))


@settings(max_examples=60, deadline=None)
@given(
    isa=st.sampled_from(ISAS),
    past=st.integers(0, 600),
    rows=st.integers(1, 70),
    dim=st.sampled_from([8, 16, 24, 32, 64, 80]),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 8),
    kv=st.sampled_from(list(SIZES)),
    window=st.one_of(st.just(0), st.integers(1, 400)),
    softcap=st.sampled_from([0.0, 30.0]),
    seed=st.integers(0, 2**32),
)
def test_random_case_equals_reference(isa, past, rows, dim, kv_heads, group, kv, window, softcap, seed):
    both(isa, Case(past, rows, dim, kv_heads * group, kv_heads, kv, window, softcap), seed)


@pytest.mark.parametrize(
    "case",
    [
        Case(past=0, rows=70),
        Case(past=300, rows=3, kv="f32"),
        Case(past=260, rows=2, window=100),
        Case(past=100, rows=4, softcap=10.0),
        Case(past=300, rows=5, kv="bf16_v8"),
        Case(past=500, rows=5, kv="i8", window=260),
    ],
)
def test_reference_is_close_to_f64(case):
    lane, qkv = filled(case, np.random.default_rng(1))
    want = attention_f64(case, lane, qkv)
    tolerance = 3e-6 if case.kv == "f32" else 1e-4  # of a p at the edge between two bf16
    assert np.abs(run("reference", case, lane, qkv) - want).max() < tolerance * np.abs(want).max()


@pytest.mark.parametrize("kv", ["bf16", "bf16_v8", "i8"])
def test_rounded_factors_stay_close_to_exact_attention(kv):
    case = Case(past=600, rows=20, kv=kv)
    lane, qkv = filled(case, np.random.default_rng(1))
    want = attention_f64(case, lane, qkv, rounded=False)
    assert np.abs(run("reference", case, lane, qkv) - want).max() < 1e-2 * np.abs(want).max()


def split_and_merge(isa, case, lane, qkv, row):
    position = case.past + row
    out = np.zeros((1, case.heads * case.dim), np.float32)
    some = min(1, case.kv_heads - 1)
    ml, o = kernels.attention_splits(isa, lane.cache, qkv, 0, row, position, 0, some)
    rest = kernels.attention_splits(isa, lane.cache, qkv, 0, row, position, some, case.kv_heads)
    half = case.heads // 2
    kernels.attention_merge(isa, lane.cache, ml + rest[0], o + rest[1], 0, half, out)
    kernels.attention_merge(isa, lane.cache, ml + rest[0], o + rest[1], half, case.heads, out)
    return out[0]


@pytest.mark.parametrize("isa", ALL)
@pytest.mark.parametrize(
    "case",
    [
        Case(past=0, rows=67, dim=32),
        Case(past=250, rows=20, kv="f32", dim=24, heads=4, kv_heads=2),
        Case(past=520, rows=70, window=300, dim=16, heads=8, kv_heads=1),
        Case(past=1010, rows=20, softcap=20.0, dim=16),
    ],
)
def test_row_has_the_same_bits_in_a_chunk_alone_and_split(isa, case):
    lane, qkv = filled(case, np.random.default_rng(2))
    together = run(isa, case, lane, qkv)
    for row in range(case.rows):
        alone = run(isa, dataclasses.replace(case, past=case.past + row, rows=1), lane, qkv[row : row + 1])
        same_bits(alone[0], together[row])
        same_bits(split_and_merge(isa, case, lane, qkv, row), together[row])


@pytest.mark.parametrize("isa", ALL)
def test_partials_equal_reference_and_say_when_nothing_is_seen(isa):
    case = Case(past=700, rows=1, window=150, dim=32)
    lane, qkv = filled(case, np.random.default_rng(3))
    ml, o = kernels.attention_splits(isa, lane.cache, qkv, 0, 0, 700, 0, case.kv_heads)
    want_ml, want_o = kernels.attention_splits("reference", lane.cache, qkv, 0, 0, 700, 0, case.kv_heads)
    same_bits(ml, want_ml)
    same_bits(o, want_o)
    m = ml[::2]
    assert (m[:2] == -np.inf).all()  # splits 0 and 1 lie before the window
    assert (m[2:] > -np.inf).all()


@pytest.mark.parametrize("isa", ALL)
@pytest.mark.parametrize("kv", list(SIZES))
def test_unseen_cache_bytes_never_matter(isa, kv):
    case = Case(past=200, rows=30, window=90, kv=kv, dim=24, heads=4, kv_heads=2)
    results = []
    for garbage in (POISON, 0x00, 0x7F, 0x80):
        lane, qkv = filled(case, np.random.default_rng(4), first=200 - 89)
        keep = {p: [x.copy() for x in lane.get(p)] for p in range(200 - 89, case.end)}
        lane.blocks[:] = garbage
        for position, (k, v) in keep.items():
            lane.put(position, k, v)
        results.append(run(isa, case, lane, qkv))
    assert np.isfinite(results[0]).all()
    for other in results[1:]:
        same_bits(other, results[0])


@pytest.mark.parametrize("isa", ALL)
def test_large_scores_neither_overflow_nor_lose_the_maximum(isa):
    case = Case(past=300, rows=2, dim=16, heads=2, kv_heads=1)
    lane, qkv = filled(case, np.random.default_rng(5))
    got = run(isa, case, lane, qkv * 1000)
    same_bits(got, run("reference", case, lane, qkv * 1000))
    assert np.isfinite(got).all()


@pytest.mark.parametrize("isa", ALL)
def test_first_position_returns_its_own_value(isa):
    case = Case(past=0, rows=1, dim=16, heads=2, kv_heads=1)
    lane, qkv = filled(case, np.random.default_rng(6))
    np.testing.assert_array_equal(run(isa, case, lane, qkv)[0].reshape(2, 16), np.repeat(lane.get(0)[1], 2, axis=0))


def test_binding_refuses_positions_outside_the_blocks():
    case = Case(past=0, rows=3, dim=16)
    lane, qkv = filled(case, np.random.default_rng(7))
    with pytest.raises(ValueError, match="position"):
        kernels.attention("reference", lane.cache, qkv, 0, positions_of(case) + 64)
