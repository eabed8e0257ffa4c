"""The pool runs every unit of every phase exactly once, whatever the threads do in between."""

from __future__ import annotations

import pytest

from calstack.native import pool_probe, pool_probe_together

pytestmark = pytest.mark.native


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize(("units", "low", "high"), [(1, 1, 1), (2, 1, 1), (7, 2, 3), (257, 1, 1 << 20), (1000, 1, 1)])
def test_every_unit_runs_exactly_once(threads: int, units: int, low: int, high: int) -> None:
    wrong, _ = pool_probe(threads, 3000, units, low, high, 0, 0)
    assert wrong == 0


@pytest.mark.parametrize("pause_us", [1, 40, 60, 500])
def test_every_unit_runs_exactly_once_when_workers_sleep_in_between(pause_us: int) -> None:
    wrong, _ = pool_probe(4, 400, 64, 1, 8, 2, pause_us)
    assert wrong == 0


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize(("units", "low", "high"), [(0, 1, 1), (1, 1, 1), (3, 4, 4), (7, 2, 3), (257, 1, 1 << 20)])
def test_every_unit_of_phases_together_runs_exactly_once_and_before_the_phase_ends(threads: int, units: int, low: int, high: int) -> None:
    wrong, _ = pool_probe_together(threads, 300, 20, units, low, high)
    assert wrong == 0


def test_more_threads_than_cores_finish_phases_together_though_some_sleep() -> None:
    wrong, _ = pool_probe_together(16, 40, 60, 64, 1, 4)
    assert wrong == 0


def test_one_thread_needs_no_barrier() -> None:
    _, ns = pool_probe(1, 20_000, 4, 1, 1, 0, 0)
    assert ns < 1000
