"""What stays of a text that outgrows the context."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calstack.errors import RequestError
from calstack.window import Window


@given(st.integers(4, 300), st.data())
def test_a_growing_text_always_fits_and_keeps_its_head_and_newest_ids(context: int, data: st.DataObject) -> None:
    prompt = data.draw(st.integers(1, context - 1))
    window = Window.of(context, data.draw(st.integers(0, min(prompt, context // 2))), prompt)
    held, shifts = list(range(prompt)), 0
    for known in range(prompt + 1, prompt + 3 * context):
        held.append(known - 1)
        if len(held) == context:
            del held[window.keep : window.keep + (context - window.keep) // 2]
            shifts += 1
        gone = window.dropped(known)
        assert held == [*range(min(window.keep, known)), *range(window.keep + gone, known)]
        assert window.shifts(known) == shifts
        assert len(held) < context


@given(st.integers(4, 300), st.integers(1, 1000), st.none() | st.integers(0, 1000), st.data())
def test_a_cut_prompt_leaves_room_and_keeps_its_head_and_its_end(
    context: int, prompt: int, wanted: int | None, data: st.DataObject
) -> None:
    window = Window.of(context, data.draw(st.integers(0, context // 2)), prompt)
    fitted = window.fit(range(prompt), wanted)
    assert len(fitted) + max(1, min(context // 4, context if wanted is None else wanted)) <= context
    assert fitted[: window.keep] == tuple(range(window.keep))
    assert fitted[-1] == prompt - 1
    assert len(fitted) == prompt or len(fitted) + 1 >= context - context // 4


def test_at_most_half_the_context_is_kept() -> None:
    assert Window.of(10, -1, 5).keep == 5
    for keep, prompt in ((-1, 6), (6, 9)):
        with pytest.raises(RequestError, match="keeps 6 of 10 positions"):
            Window.of(10, keep, prompt)
