"""The sampler: every instruction set against the scalar reference, the reference against numpy, draws against their distribution."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native.sampler_support import ISAS, Sampling, candidates, explain, penalised, same_bits, uniform

pytestmark = pytest.mark.native

ALL = ["reference", *ISAS]
GREEDY = Sampling(temperature=0.0)
VOCABS = [1, 2, 15, 16, 17, 255, 256, 257, 1000, 4097]


def logits_of(vocab, seed, spread=3.0):
    return np.random.default_rng(seed).standard_normal(vocab).astype(np.float32) * np.float32(spread)


def same(isa, s, logits):
    """The kernel's answer, after comparing it with the reference: token, top ids and adjusted logits exactly, log-probabilities nearly."""
    got, want = s.run(isa, logits), s.run("reference", logits)
    assert got[0] == want[0]
    np.testing.assert_array_equal(got[2], want[2])
    np.testing.assert_allclose(got[1], want[1], atol=1e-6)
    np.testing.assert_allclose(got[3], want[3], atol=1e-6)
    finite = ~np.isnan(want[4])
    np.testing.assert_array_equal(np.isnan(got[4]), ~finite)
    same_bits(got[4][finite], want[4][finite])
    return got


@pytest.mark.parametrize("isa", ALL)
@pytest.mark.parametrize("vocab", [*VOCABS, 49152])
def test_greedy_takes_the_highest_logit(isa, vocab):
    for seed in range(5):
        logits = logits_of(vocab, seed)
        assert GREEDY.run(isa, logits)[0] == logits.argmax()


@pytest.mark.parametrize("isa", ALL)
def test_greedy_takes_the_lowest_id_among_equals_and_zeros_of_any_sign_are_equal(isa):
    for first in (0, 3, 16, 255, 256, 700):
        logits = np.full(1000, -1, np.float32)
        logits[[first, 999]] = 5
        assert GREEDY.run(isa, logits)[0] == first
        logits[[first, 999]] = -0.0, 0.0
        assert GREEDY.run(isa, logits)[0] == first


@pytest.mark.parametrize("isa", ALL)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("at", [0, 17, 999])
def test_nan_or_infinity_gives_no_token(isa, temperature, bad, at):
    logits = logits_of(1000, 0)
    logits[at] = bad
    for softcap in (0.0, 30.0) if np.isnan(bad) else (0.0,):
        s = Sampling(temperature=temperature, top_logprobs=3, softcap=softcap)
        token, _, ids, _, _ = same(isa, s, logits)
        assert token == -1
        assert (ids == -1).all()


@pytest.mark.parametrize("isa", ALL)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_everything_masked_gives_no_token(isa, temperature):
    s = Sampling(temperature=temperature, allowed=np.zeros(1000, bool), top_k=5)
    assert s.run(isa, logits_of(1000, 0))[0] == -1
    assert Sampling(temperature=temperature).run(isa, np.full(50, -np.inf))[0] == -1


@pytest.mark.parametrize("isa", ALL)
def test_nan_under_the_mask_is_nothing(isa):
    allowed = np.ones(1000, bool)
    allowed[5] = False
    logits = logits_of(1000, 0)
    logits[5] = np.nan
    for s in (Sampling(temperature=0.0, allowed=allowed), Sampling(allowed=allowed), Sampling(allowed=allowed, top_p=0.5)):
        assert s.run(isa, logits)[0] == explain(s, np.where(allowed, logits, 0))


@pytest.mark.parametrize("isa", ALL)
@pytest.mark.parametrize("s", [Sampling(), Sampling(top_k=40), Sampling(top_p=0.9), Sampling(min_p=0.1), Sampling(temperature=0.0)])
def test_only_allowed_tokens_come_out(isa, s):
    allowed = np.zeros(1003, bool)
    allowed[[7, 500, 1002]] = True
    for index in range(20):
        token = dataclasses.replace(s, allowed=allowed, index=index).run(isa, logits_of(1003, 1))[0]
        assert allowed[token]


@pytest.mark.parametrize("isa", ALL)
def test_history_outside_the_vocabulary_is_ignored(isa):
    inside = Sampling(repetition=1.5, frequency=0.3, presence=0.2, prompt=(3,), output=(4, 4), bias={1: 2.0})
    more = dataclasses.replace(inside, prompt=(-1, 3, 100, 2**31 - 1), output=(-(2**31), 4, 50, 4), bias={1: 2.0, -5: 9.0, 50: 9.0})
    logits = logits_of(50, 3)
    same_bits(inside.run(isa, logits)[4], more.run(isa, logits)[4])


@pytest.mark.parametrize("isa", ALL)
def test_penalties_count_each_id_once_and_equal_numpy(isa):
    output = tuple(np.random.default_rng(4).integers(0, 300, 5000))
    s = Sampling(
        repetition=1.3, frequency=0.01, presence=0.7, prompt=(1, 2, 3, 2), output=output, bias={2: -1.0, 299: 4.0}, temperature=0.0
    )
    logits = logits_of(300, 5)
    same_bits(s.run(isa, logits)[4], penalised(s, logits))


FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 300},
    {"top_k": 900},
    {"top_p": 0.0},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 0.999999},
    {"min_p": 0.05},
    {"min_p": 1e-6},
    {"min_p": 2.0},
    {"top_k": 50, "top_p": 0.9},
    {"top_k": 50, "min_p": 0.1},
    {"top_p": 0.9, "min_p": 0.02},
    {"top_k": 700, "top_p": 0.99, "min_p": 0.001},
]


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("vocab", [1, 17, 257, 1000, 3001])
def test_reference_draws_what_numpy_draws(filters, vocab):
    for i, temperature in enumerate([0.3, 1.0, 5.0]):
        s = Sampling(temperature=temperature, index=i, seed=vocab, **filters)
        logits = logits_of(vocab, i)
        assert s.run("reference", logits)[0] == explain(s, logits)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("vocab", [*VOCABS, 9001])
def test_draw_equals_reference(isa, filters, vocab):
    for i, temperature in enumerate([0.3, 1.0, 50.0]):
        same(isa, Sampling(temperature=temperature, index=i, seed=7, top_logprobs=i * 5 - 1, **filters), logits_of(vocab, i))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("filters", FILTERS)
def test_draw_over_a_real_vocabulary_equals_reference(isa, filters):
    same(isa, Sampling(temperature=1.2, seed=8, top_logprobs=20, **filters), logits_of(49152, 0))
    coarse = np.round(logits_of(49152, 1) * 4) / 4  # thousands of equal logits
    same(isa, Sampling(temperature=0.9, seed=9, top_logprobs=20, **filters), coarse)


@settings(max_examples=150, deadline=None)
@given(
    isa=st.sampled_from(ISAS),
    vocab=st.integers(1, 2000),
    spread=st.sampled_from([0.0, 0.01, 1.0, 30.0, 1e30]),
    temperature=st.sampled_from([0.0, 1e-6, 0.01, 0.7, 1.0, 100.0]),
    top_k=st.one_of(st.just(0), st.just(-1), st.integers(1, 2100)),
    top_p=st.one_of(st.just(1.0), st.floats(0, 1, width=32)),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1, width=32)),
    penalties=st.tuples(st.sampled_from([1.0, 1.2]), st.sampled_from([0.0, 0.5]), st.sampled_from([0.0, -1.0])),
    softcap=st.sampled_from([0.0, 15.0]),
    share=st.sampled_from([None, 0.0, 0.01, 0.9]),
    top_logprobs=st.integers(-1, 30),
    seed=st.integers(0, 2**64 - 1),
    data=st.data(),
)
def test_random_call_equals_reference(
    isa, vocab, spread, temperature, top_k, top_p, min_p, penalties, softcap, share, top_logprobs, seed, data
):
    rng = np.random.default_rng(seed)
    ids = st.lists(st.integers(-3, vocab + 3), max_size=20)
    repetition, frequency, presence = penalties
    s = Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition=repetition,
        frequency=frequency,
        presence=presence,
        softcap=softcap,
        bias={i: float(rng.normal()) for i in data.draw(ids)},
        prompt=tuple(data.draw(ids)),
        output=tuple(data.draw(ids)),
        allowed=None if share is None else rng.random(vocab) < share,
        seed=seed,
        choice=int(rng.integers(4)),
        index=int(rng.integers(1000)),
        top_logprobs=top_logprobs,
    )
    same(isa, s, logits_of(vocab, seed % 1000, spread))


@pytest.mark.parametrize("isa", ALL)
@pytest.mark.parametrize(
    "s", [Sampling(seed=11), Sampling(seed=12, top_k=30, temperature=1.5), Sampling(seed=13, top_p=0.8), Sampling(seed=14, min_p=0.1)]
)
def test_draws_follow_the_distribution(isa, s):
    logits = logits_of(60, 20, spread=1.5)
    ids, e = candidates(s, logits)
    n = 20_000
    counts = np.bincount([dataclasses.replace(s, index=i).run(isa, logits)[0] for i in range(n)], minlength=60)
    assert counts.sum() == counts[ids].sum() == n
    expected = n * e.astype(np.float64) / e.astype(np.float64).sum()
    enough = expected >= 5
    chi2 = ((counts[ids] - expected)[enough] ** 2 / expected[enough]).sum()
    degrees = enough.sum() - 1
    assert chi2 < degrees + 4 * np.sqrt(2 * degrees), "fixed seed: a fault, not bad luck"


def test_draw_key_uses_seed_choice_and_index():
    keys = [(s, c, i) for s in (0, 1, 2**64 - 1) for c in range(4) for i in range(50)]
    values = [uniform(*key) for key in keys]
    assert len(set(values)) == len(keys)
    assert all(0 <= u < 1 for u in values)
    flat = np.zeros(4096, np.float32)  # equal logits: the token is the draw itself
    for key, u in list(zip(keys, values, strict=True))[::17]:
        s = Sampling(seed=key[0], choice=key[1], index=key[2])
        assert s.run("reference", flat)[0] == int(u * 4096)


@pytest.mark.parametrize("isa", ALL)
def test_log_probabilities_are_the_log_softmax_of_the_adjusted_logits(isa):
    s = Sampling(temperature=0.5, top_logprobs=10, repetition=1.2, prompt=(1, 2), bias={7: 3.0})
    token, logprob, ids, logprobs, z = s.run(isa, logits_of(3000, 6))
    exact = z.astype(np.float64) - np.log(np.exp(z.astype(np.float64) - z.max()).sum()) - z.max()
    np.testing.assert_allclose(logprob, exact[token], atol=2e-6)
    np.testing.assert_array_equal(ids, np.argsort(-z, kind="stable")[:10])
    np.testing.assert_allclose(logprobs, exact[ids], atol=2e-6)


@pytest.mark.parametrize("isa", ALL)
def test_more_log_probabilities_than_allowed_tokens_go_on_with_masked_ids_then_nothing(isa):
    allowed = np.zeros(6, bool)
    allowed[[4, 2]] = True
    s = Sampling(temperature=0.0, allowed=allowed, top_logprobs=8)
    _, _, ids, logprobs, _ = s.run(isa, [9, 8, 1, 7, 2, 6])
    assert ids.tolist() == [4, 2, 0, 1, 3, 5, -1, -1]
    assert np.isfinite(logprobs[:2]).all()
    assert (logprobs[2:] == -np.inf).all()


def test_binding_refuses_a_mask_that_is_too_short():
    with pytest.raises(ValueError, match="mask"):
        Sampling(allowed=np.ones(32, bool)).run("reference", logits_of(33, 0))
