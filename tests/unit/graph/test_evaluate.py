from __future__ import annotations

import numpy as np
import pytest

from calstack.frontends import open_source
from calstack.graph.evaluate import Oracle
from calstack.graph.model import GraphBundle
from calstack.graph.segments import split_graph
from tests.support.gguf_files import DATA

IDS = list(range(5, 45))


@pytest.fixture(scope="module", params=["tiny-llama", "tiny-qwen3"])
def bundle(request: pytest.FixtureRequest) -> GraphBundle:
    return open_source(DATA / request.param)


def close(one: np.ndarray, other: np.ndarray) -> bool:
    return bool(np.abs(one - other).max() <= 1e-5 * np.abs(other).max())


@pytest.mark.parametrize("chunk", [1, 16, 39])
def test_chunks_carry_the_past(bundle: GraphBundle, chunk: int) -> None:
    assert close(Oracle(bundle).logits(IDS, chunk=chunk), Oracle(bundle).logits(IDS))


def test_the_past_matters(bundle: GraphBundle) -> None:
    assert not close(Oracle(bundle).logits(IDS[20:]), Oracle(bundle).logits(IDS)[20:])


@pytest.mark.parametrize("budget", [1, 50_000, 200_000])
def test_a_model_in_segments_gives_what_it_gives_whole(bundle: GraphBundle, budget: int) -> None:
    assert len(split_graph(bundle.prefill, budget)) > 2
    assert close(Oracle(bundle, budget_bytes=budget).logits(IDS, chunk=16), Oracle(bundle).logits(IDS))


def test_a_segment_holds_at_most_the_budget_of_weights(bundle: GraphBundle) -> None:
    budget = 120_000
    for segment in split_graph(bundle.prefill, budget):
        assert sum(tensor.nbytes for tensor in segment.weights.values()) <= budget


def test_rows_of_a_batch_are_independent(bundle: GraphBundle) -> None:
    oracle = Oracle(bundle)
    both = oracle.batch([IDS, IDS[::-1]], chunk=16)
    assert close(both[0], oracle.logits(IDS))
    assert close(both[1], oracle.logits(IDS[::-1]))


def test_windows_come_one_by_one_in_order(bundle: GraphBundle) -> None:
    oracle = Oracle(bundle)
    rows = [IDS[i : i + 10] for i in range(5)]
    for got, row in zip(oracle.windows(rows, batch=2), rows, strict=True):
        assert close(got, oracle.logits(row))


def test_the_decode_graph_gives_what_prefill_gives(bundle: GraphBundle) -> None:
    assert close(Oracle(bundle, phase="decode").logits(IDS, chunk=1), Oracle(bundle).logits(IDS))


@pytest.mark.parametrize("rows", [[], [[]], [[1, 2], [3]]])
def test_rows_of_no_or_unequal_length_are_refused(bundle: GraphBundle, rows: list[list[int]]) -> None:
    with pytest.raises(ValueError, match=r"length|inhomogeneous"):
        Oracle(bundle).batch(rows)
