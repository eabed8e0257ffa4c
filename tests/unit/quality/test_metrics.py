import math

import numpy as np
import pytest

from calstack.quality.metrics import kl_of_top, log_sum_exp, score_rows

RNG = np.random.default_rng(5)
ROWS, VOCAB = 130, 50


@pytest.fixture
def logits() -> tuple[np.ndarray, np.ndarray]:
    reference = (RNG.standard_normal((ROWS, VOCAB)) * 4).astype(np.float32)
    return (reference + RNG.standard_normal(reference.shape).astype(np.float32) * 0.3).astype(np.float32), reference


def softmax(row: np.ndarray) -> list[float]:
    total = sum(math.exp(float(v)) for v in row)
    return [math.exp(float(v)) / total for v in row]


def test_scores_equal_the_definitions_row_by_row(logits: tuple[np.ndarray, np.ndarray]) -> None:
    ours, reference = logits
    following = RNG.integers(0, VOCAB, ROWS)
    scores = score_rows(ours, reference, following)
    for row in range(ROWS):
        q, p = softmax(ours[row]), softmax(reference[row])
        assert scores.nll[row] == pytest.approx(-math.log(q[following[row]]), rel=1e-9)
        assert scores.reference_nll[row] == pytest.approx(-math.log(p[following[row]]), rel=1e-9)
        assert scores.kl[row] == pytest.approx(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)), rel=1e-7)
        assert scores.agree[row] == (max(range(VOCAB), key=q.__getitem__) == max(range(VOCAB), key=p.__getitem__))


def test_equal_logits_have_no_divergence_and_agree(logits: tuple[np.ndarray, np.ndarray]) -> None:
    scores = score_rows(logits[1], logits[1] + 3, np.zeros(ROWS, np.int64))
    assert scores.agree.all()
    assert scores.kl.max() < 1e-9


def test_log_sum_exp_survives_large_logits() -> None:
    assert log_sum_exp(np.array([[1e4, 1e4]], np.float32))[0] == pytest.approx(1e4 + math.log(2))


def test_kl_over_the_top_is_a_lower_bound_that_meets_the_whole(logits: tuple[np.ndarray, np.ndarray]) -> None:
    ours, reference = logits
    whole = score_rows(ours, reference, np.zeros(ROWS, np.int64)).kl
    for top in (8, VOCAB):
        ids = np.argsort(-reference, axis=1)[:, :top]
        found = kl_of_top(ours, ids, np.take_along_axis(reference, ids, axis=1), log_sum_exp(reference))
        assert (found <= whole + 1e-6).all()
        if top == VOCAB:
            np.testing.assert_allclose(found, whole, atol=1e-5)
        else:
            assert found.mean() > 0.5 * whole.mean()


def test_kl_over_the_top_sees_a_wrong_distribution() -> None:
    reference = np.zeros((1, VOCAB), np.float32)
    reference[0, 3] = 10
    wrong = np.roll(reference, 1, axis=1)
    ids = np.argsort(-reference, axis=1)[:, :8]
    assert kl_of_top(wrong, ids, np.take_along_axis(reference, ids, axis=1), log_sum_exp(reference))[0] > 5
