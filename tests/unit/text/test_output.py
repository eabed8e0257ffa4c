"""Parts of an answer do not depend on how its text was cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calstack.text.output import OutputParser, Thinking, ToolFormat
from tests.unit.text.test_stops import cut

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "}\\" é", "b": [{}]}}\n</tool_call>'
PIECES = ["<think>", "</think>", "<tool_call>", "</tool_call>", CALL, '{"name": "f", "parameters": {}}', " \n", "text", "<", "{", '"', "é"]


def parsed(parser: OutputParser, pieces: list[str]) -> list[tuple[str, int, str]]:
    out: list[tuple[str, int, str]] = []
    for part in [part for piece in pieces for part in parser.push(piece)] + parser.flush():
        if out and out[-1][:2] == (part.kind, part.call) and part.kind != "call":
            out[-1] = (part.kind, part.call, out[-1][2] + part.text)
        else:
            out.append((part.kind, part.call, part.text))
    return out


@given(
    st.lists(st.sampled_from(PIECES), max_size=8).map("".join),
    st.lists(st.integers(0, 200), max_size=6),
    st.sampled_from(Thinking),
    st.sampled_from(ToolFormat),
)
def test_parts_are_the_same_however_the_text_is_cut(text: str, places: list[int], thinking: Thinking, tools: ToolFormat) -> None:
    def parser() -> OutputParser:
        return OutputParser(thinking=thinking, tools=tools, names={"f"})

    assert parsed(parser(), cut(text, places)) == parsed(parser(), [text] if text else [])


@pytest.mark.parametrize("text", ["plain", " spaced ", "<think>", "a</think>b"])
def test_nothing_is_parsed_where_nothing_was_asked_for(text: str) -> None:
    assert parsed(OutputParser(), list(text)) == [("content", -1, text)]


def test_call_gives_its_exact_arguments() -> None:
    parser = OutputParser(tools=ToolFormat.HERMES, names={"f"})
    assert parsed(parser, [CALL]) == [("call", 0, "f"), ("arguments", 0, '{"a": "}\\" é", "b": [{}]}')]
    assert (parser.calls, parser.complete_calls) == (1, 1)


def test_llama_calls_are_the_whole_answer() -> None:
    text = '{"name": "f", "parameters": {"a": 1}}; {"name": "f", "parameters": {}}'
    parts = parsed(OutputParser(tools=ToolFormat.LLAMA, names={"f"}), [text])
    assert parts == [("call", 0, "f"), ("arguments", 0, '{"a": 1}'), ("call", 1, "f"), ("arguments", 1, "{}")]


def test_call_of_an_unknown_function_stays_text() -> None:
    text = CALL.replace('"f"', '"g"')
    assert parsed(OutputParser(tools=ToolFormat.HERMES, names={"f"}), [text]) == [("content", -1, text)]
