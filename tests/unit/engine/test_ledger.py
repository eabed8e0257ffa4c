"""The step ledger: labels by priority, overlaps counted once, sums equal to wall time."""

from __future__ import annotations

import pytest

from calstack.devices.base import Completion
from calstack.engine.ledger import Ledger
from tests.support.facts import small_facts
from tests.support.harness import Harness


def done(finished: int, h2d: int, infer: int, d2h: int) -> Completion:
    return Completion(0, (), 0, 0, finished_ns=finished, h2d_ns=h2d, infer_ns=infer, d2h_ns=d2h, h2d_bytes=0, d2h_bytes=0)


def sums(ledger: Ledger) -> dict[str, int]:
    return {label: round(s * 1e9) for label, s in ledger.seconds().items()}


def test_each_instant_has_the_label_of_highest_priority() -> None:
    ledger = Ledger(0)
    ledger.host(0, 40, work=False)
    ledger.host(40, 140, work=True)
    ledger.launch(done(100, 10, 30, 5), 4, 4)  # h2d 55..65, infer 65..95, d2h 95..100
    ledger.launch(done(120, 20, 10, 5), 4, 4)  # h2d 85..105, infer 105..115, d2h 115..120
    ledger.settle(140)
    assert sums(ledger) == {"infer": 40, "h2d": 20, "d2h": 5, "framework": 35, "idle": 40}
    assert sum(sums(ledger).values()) == ledger.wall_ns == 140


def test_a_launch_that_ends_late_claims_time_before_it_only_once_settled() -> None:
    ledger = Ledger(0)
    ledger.host(0, 50, work=True)
    ledger.settle(20)
    ledger.host(50, 100, work=True)
    ledger.launch(done(90, 0, 60, 0), 1, 1)
    ledger.settle(100)
    assert sums(ledger)["infer"] == 60
    assert sums(ledger)["framework"] == 40


def test_padding_is_the_useless_share_of_infer() -> None:
    ledger = Ledger(0)
    ledger.launch(done(100, 0, 80, 0), 4, 1)
    assert ledger.padding_ns == 60


@pytest.mark.parametrize("depth_tick", [500_000, 1_000_000, 7_000_000])
def test_times_of_a_served_load_add_up_to_wall_time(depth_tick: int) -> None:
    h = Harness(small_facts())
    h.tick(5_000_000)
    h.run(*[h.submit(f"r{i}", prompt=tuple(range(i, i + 10)), max_tokens=20) for i in range(6)], tick_ns=depth_tick)
    h.tick(5_000_000)
    seconds = h.driver.ledger.seconds()
    wall = (h.clock.now_ns() - h.driver.ledger.start_ns) / 1e9
    assert sum(seconds.values()) == pytest.approx(wall, rel=0.02)
    assert seconds["infer"] > 0
    assert seconds["idle"] >= 0.009


def test_many_spans_are_labelled_as_few_are() -> None:
    """More launches than are labelled together, settled at every turn or once at the end: the same sums."""
    often, once = Ledger(0), Ledger(0)
    for ledger in (often, once):
        for i in range(200):
            ledger.host(100 * i, 100 * (i + 1), work=i % 3 > 0)
            ledger.launch(done(100 * i + 90, 10, 50, 5), 4, 4)
            if ledger is often:
                ledger.settle(100 * i)
                ledger.seconds()
        ledger.settle(20_000)
    assert sums(often) == sums(once)
    assert sum(sums(once).values()) == once.wall_ns == 20_000
