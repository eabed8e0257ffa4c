"""Measured step costs and what is computed from them."""

from __future__ import annotations

import pytest

from calstack.engine.costs import StepCosts, wait_estimate_s


def measured(row_ms: float = 1.0, step_ms: float = 10.0) -> StepCosts:
    costs = StepCosts()
    costs.prefill(10, int(10 * row_ms * 1e6))
    costs.decode("d", int(step_ms * 1e6))
    return costs


def test_rows_within_leaves_room_for_a_decode_step() -> None:
    assert measured().rows_within(50e6, 4) == 40
    assert measured().rows_within(11e6, 4) == 4


def test_nothing_bounds_a_chunk_before_anything_was_measured() -> None:
    assert StepCosts().rows_within(50e6, 4) > 1 << 20


def test_the_tail_waits_for_the_lanes_and_for_the_prefill_before_it() -> None:
    costs = measured()
    assert wait_estimate_s(costs, 2, [(0, 100), (0, 50)], []) == pytest.approx(0.5)
    assert wait_estimate_s(costs, 2, [(0, 100), (0, 50)], [(100, 20)]) == pytest.approx(0.8)
    assert wait_estimate_s(costs, 2, [(0, 100)], []) == 0.0


def test_output_share_follows_what_requests_make() -> None:
    costs = StepCosts()
    for _ in range(30):
        costs.ended(25, 100)
    assert costs.output_share == pytest.approx(0.25, abs=0.01)
