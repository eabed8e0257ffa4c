"""Constraints, tools and newer routes on the real model: a weak model, so what comes out right is enforced."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.support.served import Served, served
from tests.unit.server.test_tools import gathered

pytestmark = [pytest.mark.e2e, pytest.mark.native]

PLACE = {
    "type": "object",
    "properties": {"city": {"enum": ["Zürich", "東京"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
UNIT = {"type": "object", "properties": {"unit": {"enum": ["c", "f"]}}, "required": ["unit"], "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in (("forecast", PLACE), ("set_unit", UNIT))
]
SCHEMAS = {"forecast": PLACE, "set_unit": UNIT}
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "How will the weather be?"}], "max_tokens": 120}
FORCED = "a😀漢🇫🇷é b"


@pytest.fixture(scope="module")
def server(smollm2_calbin: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(smollm2_calbin, tmp_path_factory.mktemp("served") / "log") as running:
        yield running


def chat(server: Served, **more: Any) -> dict[str, Any]:
    response = server.http.post("/v1/chat/completions", json=ASK | more)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()["choices"][0]
    return answer


def events(server: Served, **more: Any) -> list[dict[str, Any]]:
    response = server.http.post("/v1/chat/completions", json=ASK | more | {"stream": True})
    assert response.status_code == 200, response.text
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]


def test_forced_text_of_split_characters_comes_whole_in_both_modes(server: Served) -> None:
    body = {"grammar": f'root ::= "{FORCED}"', "temperature": 0}
    assert chat(server, **body)["message"]["content"] == FORCED
    assert gathered(events(server, **body))[0] == FORCED


@pytest.mark.parametrize("limit", [1, 2, 3, 5])
def test_limit_inside_a_forced_character_is_a_length(server: Served, limit: int) -> None:
    body = {"grammar": 'root ::= "😀😀"', "temperature": 0, "max_tokens": limit}
    choice = chat(server, **body)
    assert choice["finish_reason"] == "length"
    assert "😀😀".startswith(choice["message"]["content"])
    assert gathered(events(server, **body))[0] == choice["message"]["content"]


def test_stop_over_forced_tokens(server: Served) -> None:
    body = {"grammar": 'root ::= "A B C D E F G"', "temperature": 0, "stop": ["C D E"]}
    assert (chat(server, **body)["message"]["content"], gathered(events(server, **body))[0]) == ("A B ", "A B ")


def test_documents_validate_at_any_temperature_and_side_by_side(server: Served) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda seed: chat(server, response_format=form, seed=seed, temperature=1.5), range(20)))
    finished = [answer for answer in answers if answer["finish_reason"] == "stop"]  # white space may use up the limit at this temperature
    assert len(finished) > 10
    for answer in finished:
        jsonschema.validate(json.loads(answer["message"]["content"]), PLACE)
    alone = [chat(server, response_format=form, seed=seed, temperature=1.5)["message"]["content"] for seed in range(3)]
    assert alone == [answer["message"]["content"] for answer in answers[:3]]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "set_unit"}}], ids=["required", "named"])
@pytest.mark.parametrize("tools", [TOOLS[1:], TOOLS], ids=["one tool", "two tools"])
def test_forced_calls_are_valid_for_ten_seeds(server: Served, choice: Any, tools: list[Any]) -> None:
    for seed in range(10):
        body = {"tools": tools, "tool_choice": choice, "seed": seed, "temperature": 1}
        answer = chat(server, **body)
        (call,) = answer["message"]["tool_calls"]
        name = call["function"]["name"]
        assert answer["finish_reason"] == "tool_calls"
        assert name in ({"set_unit"} if isinstance(choice, dict) else {tool["function"]["name"] for tool in tools})
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[name])
    content, calls, finish = gathered(events(server, **body))
    assert (content, finish, [c["function"] for c in calls]) == ("", "tool_calls", [call["function"]])


def test_free_choice_of_tools_gives_text_or_whole_calls(server: Served) -> None:
    for seed in range(5):
        answer = chat(server, tools=TOOLS, seed=seed)
        if answer["finish_reason"] == "tool_calls":
            assert all(json.loads(call["function"]["arguments"]) is not None for call in answer["message"]["tool_calls"])
        else:
            assert answer["message"]["content"]


def test_constraint_survives_the_death_of_the_engine_process(server: Served) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string", "minLength": 60, "maxLength": 80}}}
    body = {"response_format": form, "seed": 4, "temperature": 1}
    wanted = chat(server, **body)
    with server.http.stream("POST", "/v1/chat/completions", json=ASK | body | {"stream": True}) as response:
        got, killed = "", False
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            got += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
            if got and not killed:
                killed = True
                os.kill(server.engine_pid(), signal.SIGKILL)
    assert got == wanted["message"]["content"]
    server.wait_idle()


def test_newer_routes_say_what_the_chat_route_says(server: Served) -> None:
    body = {"temperature": 0, "max_tokens": 12}
    said = chat(server, **body)["message"]["content"]
    responses = server.http.post("/v1/responses", json={"input": ASK["messages"], "temperature": 0, "max_output_tokens": 12}).json()
    assert responses["output"][0]["content"][0]["text"] == said
    messages = server.http.post("/v1/messages", json=ASK | body).json()
    assert messages["content"][0]["text"] == said
    prompt = server.http.post("/apply-template", json=ASK).json()["prompt"]
    native = server.http.post("/completion", json={"prompt": prompt, "temperature": 0, "n_predict": 12}).json()
    assert native["content"] == said
