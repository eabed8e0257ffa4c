"""Facts of a calbin: bounds of submodels and what a calbin must have."""

from __future__ import annotations

import dataclasses

import pytest

from calstack.errors import ArtifactError
from calstack.runtime.facts import Extent
from calstack.specs import Role
from tests.support.facts import small_facts, submodel


@pytest.mark.parametrize(
    ("lanes", "fits"),
    [
        ([Extent(0, 4)], True),
        ([Extent(0, 4)] * 2, True),
        ([Extent(0, 4)] * 3, False),
        ([Extent(0, 5)], False),
        ([Extent(12, 4)], True),
        ([Extent(13, 4)], False),
        ([Extent(0, 0)], False),
        ([Extent(-1, 1)], False),
        ([], False),
    ],
)
def test_fits_keeps_batch_length_context_and_rows(lanes: list[Extent], fits: bool) -> None:
    assert submodel(Role.PREFILL, 2, 4, 16).fits(lanes) is fits


def test_fits_keeps_the_rows_of_all_lanes_together() -> None:
    sub = submodel(Role.PREFILL, 4, 4, 16, rows=6)
    assert sub.fits([Extent(0, 3)] * 2)
    assert not sub.fits([Extent(0, 4)] * 2)


def test_context_is_what_both_phases_and_the_model_hold() -> None:
    facts = small_facts(context=96)
    assert facts.context == 96
    longer = dataclasses.replace(facts, submodels=(*facts.submodels, submodel(Role.DECODE, 1, 1, 500)), model_context=80)
    assert longer.context == 80


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_calbin_without_a_phase_is_refused(role: Role) -> None:
    facts = small_facts()
    lame = dataclasses.replace(facts, submodels=tuple(s for s in facts.submodels if s.role is not role))
    with pytest.raises(ArtifactError, match=f"no {role} submodel"):
        lame.check()


def test_lane_regions_are_refused() -> None:
    with pytest.raises(ArtifactError, match="lane"):
        small_facts().check("lane")
