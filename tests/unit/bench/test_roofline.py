"""Shares of the limit: each round against the ceilings around it, and a ceiling that was measured too low."""

import pytest
from msgspec.structs import replace
from tests.support.calbins import manifest

from calstack import api
from calstack.bench.roofline import Roofline
from calstack.bench.runner import DECODE_STEPS, Point
from calstack.calbin.manifest import Workload
from calstack.errors import UsageError

POINT = Point("decode", 0, 64, 1)


def roofline(monkeypatch: pytest.MonkeyPatch, read: list[float]) -> Roofline:
    made = manifest(arena=1 << 16)
    load = (
        Workload(unit="macs", constant=0.0, per_token=1.0, per_past_token=0.0),
        Workload(unit="bytes", constant=1e9, per_token=0.0, per_past_token=0.0),
    )
    made = replace(made, submodels=(replace(made.submodels[0], workload=load),))
    readings = iter(read)
    monkeypatch.setattr(api, "ceilings", lambda **_: api.Ceilings(next(readings), 1e9))
    roof = Roofline(made, isa="", threads=1)
    for _ in read:
        roof.measure(POINT)
    return roof


def test_each_round_is_held_against_the_ceilings_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    roof = roofline(monkeypatch, [50.0, 50.0, 100.0, 100.0])
    fastest = [DECODE_STEPS / 50, DECODE_STEPS / 75, DECODE_STEPS / 100]  # seconds that 1 GB a step takes at least
    assert roof.share(POINT, [2 * s for s in fastest]) == pytest.approx(0.5)


def test_more_than_the_limit_is_refused_as_a_bad_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    roof = roofline(monkeypatch, [50.0, 50.0])
    with pytest.raises(UsageError, match="measured too low"):
        roof.share(POINT, [0.9 * DECODE_STEPS / 50])
