import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calstack.calbin.program import Call, Linear, Weight
from calstack.compiler.memory_plan import Life, lifetimes, plan_buffers
from calstack.specs import WeightFormat
from tests.support.tiny import TINY, plan


def linear(x: str, out: str) -> Call:
    return Linear(x=x, weight=Weight(tensor="w", format=WeightFormat.F32, n=1, k=1), out=out)


def check(calls: list[Call], widths: dict[str, int], rows: int) -> None:
    buffers, arena = plan_buffers(calls, widths, rows)
    lives = lifetimes(calls)
    assert {b.name for b in buffers} == set(lives)
    for buffer in buffers:
        assert buffer.offset % 64 == 0
        assert buffer.offset >= 0
        assert buffer.offset + buffer.bytes <= arena
    for a, b in itertools.combinations(buffers, 2):
        if lives[a.name].meets(lives[b.name]):
            assert a.offset + a.bytes <= b.offset or b.offset + b.bytes <= a.offset, (a, b)


@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)).filter(lambda p: p[0] != p[1]), min_size=1, max_size=24),
    st.lists(st.integers(1, 300), min_size=8, max_size=8),
    st.integers(1, 33),
)
def test_buffers_alive_together_never_overlap(pairs: list[tuple[int, int]], widths: list[int], rows: int) -> None:
    check([linear(f"b{x}", f"b{y}") for x, y in pairs], {f"b{i}": w for i, w in enumerate(widths)}, rows)


@pytest.mark.parametrize("name", TINY)
def test_programs_of_models_never_overlap_live_buffers_and_reuse_dead_ones(name: str) -> None:
    for draft in plan(name).drafts:
        widths = {b.name: b.width for b in draft.program.buffers}
        check(list(draft.program.streams[0]), widths, draft.program.rows)
        assert draft.program.arena_bytes[0] < sum(b.bytes for b in draft.program.buffers)


def test_chain_of_equal_buffers_needs_two_regions() -> None:
    calls = [linear(f"b{i}", f"b{i + 1}") for i in range(10)]
    assert plan_buffers(calls, {f"b{i}": 16 for i in range(11)}, 1)[1] == 2 * 64


@pytest.mark.parametrize(("a", "b", "meet"), [((0, 1), (1, 2), True), ((0, 1), (2, 3), False), ((0, 9), (4, 5), True)])
def test_lives_meet_when_some_call_touches_both(a: tuple[int, int], b: tuple[int, int], meet: bool) -> None:
    assert Life(*a).meets(Life(*b)) is meet
    assert Life(*b).meets(Life(*a)) is meet
