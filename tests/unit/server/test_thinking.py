"""Thoughts: separated, counted, bounded, turned off."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.live_server import LiveServer, live_server
from tests.support.tiny_model import TEMPLATE

# As Qwen3's: thinks unless told not to.
THINKING = TEMPLATE + (
    "{%- if add_generation_prompt and enable_thinking is defined and enable_thinking is false -%}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif -%}"
)
OPENED = TEMPLATE.replace("assistant<|say|>' }}", "assistant<|say|><think>\\n' }}")  # as reasoning models without a switch


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("thinker"), template=THINKING) as running:
        yield running


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("opened"), template=OPENED + "{#- </think> -#}") as running:
        yield running


def both(server: LiveServer, text: str, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Choice and usage of the whole answer; the stream must say the same."""
    body = {"messages": [{"role": "user", "content": text}], **more}
    whole = server.post("/v1/chat/completions", **body)
    assert whole.status_code == 200, whole.text
    choice, usage = whole.json()["choices"][0], whole.json()["usage"]
    events = server.events("/v1/chat/completions", **body, stream_options={"include_usage": True})
    for name in ("content", "reasoning_content"):
        parts = [c["delta"].get(name) or "" for event in events for c in event["choices"]]
        assert "".join(parts) == (choice["message"].get(name) or "")
    assert events[-1]["usage"] == usage
    return choice, usage


def test_thought_is_separated_and_counted(thinker: LiveServer) -> None:
    choice, usage = both(thinker, "<think>\nfirst 漢 then\n</think>\n\nthe answer")
    assert choice["message"]["reasoning_content"] == "first 漢 then"
    assert choice["message"]["content"] == "the answer"
    ids = thinker.post("/tokenize", content="<think>\nfirst 漢 then\n</think>").json()["tokens"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] in range(len(ids), len(ids) + 2)


def test_answer_without_a_thought_is_content(thinker: LiveServer) -> None:
    choice, usage = both(thinker, "<thin air")
    assert choice["message"]["content"] == "<thin air"
    assert "reasoning_content" not in choice["message"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 0


def test_thought_that_the_prompt_opened_is_separated(opened: LiveServer) -> None:
    choice, _ = both(opened, "hidden</think>shown")
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("hidden", "shown")


@pytest.mark.parametrize(
    "fields", [{"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}, {"thinking_budget_tokens": 0}]
)
def test_thinking_turned_off_closes_the_thought_in_the_prompt(thinker: LiveServer, opened: LiveServer, fields: dict[str, Any]) -> None:
    for server in (thinker, opened):
        choice, usage = both(server, "plain", **fields)
        assert choice["message"]["content"] == "plain"
        assert usage["completion_tokens_details"]["reasoning_tokens"] == 0


def test_short_limit_leaves_tokens_for_the_answer(opened: LiveServer) -> None:
    choice, usage = both(opened, "abcdefgh ijklm", ignore_eos=True, max_tokens=60)
    assert choice["message"]["reasoning_content"].startswith("abcdefgh")
    assert choice["message"]["content"]
    assert choice["finish_reason"] == "length"
    assert usage["completion_tokens"] == 60
    assert 30 <= usage["completion_tokens_details"]["reasoning_tokens"] < 50
    opened.assert_idle_soon()


@pytest.mark.parametrize("budget", [1, 5, 17])
def test_budget_closes_the_thought(opened: LiveServer, budget: int) -> None:
    choice, usage = both(opened, "abcdefgh ijklm", ignore_eos=True, max_tokens=60, thinking_budget_tokens=budget)
    assert choice["message"]["content"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == budget


def test_no_budget_lets_the_thought_take_all(opened: LiveServer) -> None:
    choice, _ = both(opened, "abcdefgh ijklm", ignore_eos=True, max_tokens=30, thinking_budget_tokens=-1)
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")


def test_log_probabilities_cover_a_closed_thought(opened: LiveServer) -> None:
    response = opened.chat("abcdefgh ijklm", ignore_eos=True, max_tokens=40, thinking_budget_tokens=5, logprobs=True)
    entries = response.json()["choices"][0]["logprobs"]["content"]
    assert len(entries) == 40
    assert b"</think>" in b"".join(bytes(entry["bytes"]) for entry in entries)


def test_raw_reasoning_format_leaves_the_text_whole(opened: LiveServer) -> None:
    assert both(opened, "hidden</think>shown", reasoning_format="none")[0]["message"]["content"] == "hidden</think>shown"


def test_constraint_bounds_the_answer_and_not_the_thought(thinker: LiveServer, opened: LiveServer) -> None:
    choice, _ = both(thinker, "<think>free\n</think>\n\nyes", structured_outputs={"choice": ["yes", "no"]})
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("free", "yes")
    choice, _ = both(opened, "free</think>maybe", structured_outputs={"choice": ["yes"]})
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("free", "yes")


@pytest.mark.parametrize(("field", "value"), [("thinking_budget_tokens", -2), ("reasoning_format", "loud"), ("reasoning_effort", 5)])
def test_odd_wish_is_a_400(thinker: LiveServer, field: str, value: Any) -> None:
    response = thinker.chat("x", **{field: value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field
