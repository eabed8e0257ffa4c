from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calstack.text.stops import StopMatcher

SMALL = st.text("ab", max_size=12)


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops)
    out = [matcher.push(piece) for piece in pieces]
    return ([*out, matcher.flush()] if matcher.matched is None else out), matcher.matched


def expected(stops: list[str], text: str) -> tuple[str, str | None]:
    """By definition: the stop whose end comes first, the longest of those."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def cut(text: str, places: list[int]) -> list[str]:
    borders = [0, *sorted({place % (len(text) + 1) for place in places}), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(borders)]


@given(st.lists(st.text("ab", max_size=4), max_size=3), SMALL, st.lists(st.integers(0, 12), max_size=6))
def test_result_is_that_of_the_definition_however_the_text_is_cut(stops: list[str], text: str, places: list[int]) -> None:
    out, matched = run(stops, cut(text, places))
    assert ("".join(out), matched) == expected(stops, text)


@given(SMALL, st.lists(st.integers(0, 12), max_size=6))
def test_text_without_a_match_comes_complete_and_once(text: str, places: list[int]) -> None:
    assert "".join(run(["aaaaaaaaaaaaaab"], cut(text, places))[0]) == text


def test_stop_over_several_pieces_leaks_nothing() -> None:
    assert run(["C D E"], list("A B C D E F")) == ([*"A B ", "", "", "", "", "", "", ""], "C D E")


def test_text_that_only_begins_like_a_stop_is_held_then_flushed_once() -> None:
    pieces = ["Al", " Ali", " Alic", " Alice", "-", " end"]
    assert "".join(run(["Alice:"], pieces)[0]) == "Al Ali Alic Alice- end"


@pytest.mark.parametrize("stops", [[""], [], ["", "zzz"]])
def test_empty_stop_never_matches(stops: list[str]) -> None:
    assert run(stops, ["some", " text"])[1] is None


def test_stop_inside_one_piece_cuts_it() -> None:
    assert run(["END"], ["before END after"]) == (["before "], "END")
