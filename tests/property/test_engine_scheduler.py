"""The planner over generated constraint sets: it never asks for what is forbidden, and never leaves a servable request out for good."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from calstack.engine.scheduler import Planner
from calstack.runtime.facts import CalbinFacts, Extent, SubmodelFacts
from calstack.specs import Role


@st.composite
def submodels(draw: st.DrawFn, role: Role, index: int) -> SubmodelFacts:
    batch = draw(st.integers(1, 16))
    q_len = 1 if role is Role.DECODE else draw(st.integers(1, 64))
    rows = draw(st.integers(1, batch * q_len))
    return SubmodelFacts(f"{role}.{index}", role, batch, q_len, draw(st.integers(2, 128)), rows, "paged")


@st.composite
def facts(draw: st.DrawFn) -> CalbinFacts:
    subs = [draw(submodels(role, i)) for role in (Role.PREFILL, Role.DECODE) for i in range(draw(st.integers(1, 4)))]
    most = draw(st.integers(1, 128))
    return CalbinFacts(
        name="generated",
        submodels=tuple(subs),
        max_tokens_per_launch=most,
        late_inputs=False,
        block_positions=8,
        bytes_per_block=1,
        vocab=10,
        model_context=1 << 20,
    )


def allowed(facts: CalbinFacts, sub: SubmodelFacts, lanes: list[Extent]) -> bool:
    return (
        len(lanes) <= sub.batch
        and sum(e.cur for e in lanes) <= min(sub.rows, facts.max_tokens_per_launch)
        and all(1 <= e.cur <= sub.q_len and e.end <= sub.context for e in lanes)
    )


@given(facts(), st.lists(st.integers(0, 127), min_size=1, max_size=20))
def test_decode_keeps_every_bound_and_serves_the_first_that_can_be(facts: CalbinFacts, pasts: list[int]) -> None:
    servable = [i for i, past in enumerate(pasts) if any(s.context > past for s in facts.of_role(Role.DECODE))]
    choice = Planner(facts).decode(pasts)
    if choice is None:
        assert not servable
        return
    lanes = [Extent(pasts[i], n) for i, n in choice.lanes]
    assert choice.submodel.role is Role.DECODE
    assert allowed(facts, choice.submodel, lanes)
    assert choice.lanes[0][0] == servable[0]
    assert len({i for i, _ in choice.lanes}) == len(lanes)


@given(facts(), st.lists(st.integers(0, 127), min_size=1, max_size=20))
def test_decode_takes_the_smallest_submodel_that_fits(facts: CalbinFacts, pasts: list[int]) -> None:
    choice = Planner(facts).decode(pasts)
    if choice is not None:
        lanes = [Extent(pasts[i], n) for i, n in choice.lanes]
        fitting = [s for s in facts.of_role(Role.DECODE) if allowed(facts, s, lanes)]
        assert choice.submodel.rows == min(s.rows for s in fitting)


wants = st.lists(st.builds(Extent, st.integers(0, 127), st.integers(1, 200)), min_size=1, max_size=8)


@given(facts(), wants, st.integers(0, 300))
def test_prefill_keeps_every_bound_and_serves_the_first_that_can_be(facts: CalbinFacts, wants: list[Extent], budget: int) -> None:
    servable = [i for i, want in enumerate(wants) if any(s.context > want.past for s in facts.of_role(Role.PREFILL))]
    choice = Planner(facts).prefill(wants, budget)
    if choice is None:
        assert not servable
        return
    lanes = [Extent(wants[i].past, n) for i, n in choice.lanes]
    assert choice.submodel.role is Role.PREFILL
    assert allowed(facts, choice.submodel, lanes)
    assert sum(e.cur for e in lanes) <= max(budget, 1)
    assert all(0 < n <= wants[i].cur for i, n in choice.lanes)
    assert choice.lanes[0][0] == servable[0]
