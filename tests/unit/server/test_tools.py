"""Trials E: tools, forced and free, streamed and whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from tests.support.live_server import LiveServer, live_server

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
GET: dict[str, Any] = {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": CITY}}
UNIT = {"type": "object", "properties": {"unit": {"enum": ["c", "f"]}}, "required": ["unit"], "additionalProperties": False}
SET: dict[str, Any] = {"type": "function", "function": {"name": "set_unit", "parameters": UNIT}}
SCHEMAS = {"get_weather": CITY, "set_unit": UNIT}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("tools"), context=4096) as running:
        yield running


def said(name: str, arguments: Any) -> str:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>'


def gathered(events: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]], str]:
    """Content, calls and finish reason of a stream with one choice."""
    content, finish = "", ""
    calls: list[dict[str, Any]] = []
    for choice in (choice for event in events for choice in event["choices"]):
        content += choice["delta"].get("content") or ""
        for piece in choice["delta"].get("tool_calls", ()):
            if piece["index"] == len(calls):
                assert piece["type"] == "function"
                calls.append({"id": piece["id"], "type": "function", "function": dict(piece["function"])})
            else:
                calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
        finish = choice["finish_reason"] or finish
    return content, calls, finish


def both(server: LiveServer, text: str, **more: Any) -> dict[str, Any]:
    """The whole answer's choice; the stream must say the same."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 300, **more}
    whole = server.post("/v1/chat/completions", **body)
    assert whole.status_code == 200, whole.text
    choice: dict[str, Any] = whole.json()["choices"][0]
    content, calls, finish = gathered(server.events("/v1/chat/completions", **body))
    assert content == (choice["message"]["content"] or "")
    assert [call["function"] for call in calls] == [call["function"] for call in choice["message"].get("tool_calls", [])]
    assert finish == choice["finish_reason"]
    return choice


def test_arguments_with_unicode_quotes_and_escapes_arrive_once_and_parse(server: LiveServer) -> None:
    city = 'Zürich 東京 😀 "q" \\n'
    choice = both(server, said("get_weather", {"city": city}), tools=[GET])
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": city}
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")


def test_text_before_a_call_stays_content_and_several_calls_are_listed(server: LiveServer) -> None:
    text = "Let me see.\n" + said("get_weather", {"city": "A"}) + "\n" + said("set_unit", {"unit": "c"})
    message = both(server, text, tools=[GET, SET])["message"]
    assert message["content"] == "Let me see."
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather", "set_unit"]
    assert len({call["id"] for call in message["tool_calls"]}) == 2


def test_one_call_only_without_parallel_calls(server: LiveServer) -> None:
    text = said("get_weather", {"city": "A"}) + "\n" + said("get_weather", {"city": "B"})
    assert len(both(server, text, tools=[GET], parallel_tool_calls=False)["message"]["tool_calls"]) == 1


@pytest.mark.parametrize("text", ["plain answer", "a < b and <tool", '{"name": "x"}'])
def test_answer_without_a_call_is_content(server: LiveServer, text: str) -> None:
    choice = both(server, text, tools=[GET])
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize("more", [{"tool_choice": "none"}, {"tools": []}, {"tools": None}])
def test_without_tools_a_call_is_text(server: LiveServer, more: dict[str, Any]) -> None:
    text = said("get_weather", {"city": "A"})
    choice = both(server, text, **{"tools": [GET], **more})
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "set_unit"}}], ids=["required", "named"])
@pytest.mark.parametrize("tools", [[SET], [GET, SET]], ids=["one tool", "two tools"])
def test_forced_call_is_valid_whatever_the_model_wants(server: LiveServer, seed: int, choice: Any, tools: list[Any]) -> None:
    answer = both(server, "no tool at all", tools=tools, tool_choice=choice, seed=seed)
    assert answer["finish_reason"] == "tool_calls"
    (call,) = answer["message"]["tool_calls"]
    name = call["function"]["name"]
    assert name in ({"set_unit"} if isinstance(choice, dict) else {tool["function"]["name"] for tool in tools})
    jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[name])


def test_call_cut_by_the_limit_says_length(server: LiveServer) -> None:
    assert both(server, said("get_weather", {"city": "a long name of a city"}), tools=[GET], max_tokens=60)["finish_reason"] == "length"


def test_logprobs_with_tools_in_a_stream_cover_every_token(server: LiveServer) -> None:
    text = said("get_weather", {"city": "東京"})
    events = server.events("/v1/chat/completions", messages=[{"role": "user", "content": text}], tools=[GET], logprobs=True, max_tokens=200)
    entries = [e for event in events for c in event["choices"] if c["logprobs"] for e in c["logprobs"]["content"]]
    assert b"".join(bytes(entry["bytes"]) for entry in entries) == text.encode()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [GET], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [GET], "tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
        ({"tools": [{}]}, "tools[0]"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [GET, GET]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array", "uniqueItems": True}}}]}, "tools"),
        ({"tools": [GET], "response_format": {"type": "json_object"}}, "tools"),
    ],
)
def test_malformed_tools_are_a_400(server: LiveServer, fields: dict[str, Any], param: str) -> None:
    response = server.chat("x", **fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_history_of_calls_is_shown_to_a_model_whose_template_knows_none(server: LiveServer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "A"}'}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "user", "content": "thanks"},
    ]
    response = server.post("/v1/chat/completions", messages=messages, tools=[GET])
    assert response.json()["choices"][0]["message"]["content"] == "thanks"


def test_openai_package_streams_a_call(server: LiveServer) -> None:
    stream = server.openai.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": said("get_weather", {"city": "A"})}],
        tools=[GET],
        stream=True,
    )
    pieces = [piece for chunk in stream for piece in chunk.choices[0].delta.tool_calls or ()]
    assert pieces[0].function is not None
    assert pieces[0].function.name == "get_weather"
    assert json.loads("".join(piece.function.arguments or "" for piece in pieces if piece.function)) == {"city": "A"}
