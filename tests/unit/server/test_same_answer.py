"""On every generating route a stream says what the whole answer says: text, thoughts, calls, usage, finish reason, log-probabilities."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.live_server import LiveServer, live_server
from tests.unit.server.test_thinking import THINKING
from tests.unit.server.test_tools import GET, said

CALL = said("get_weather", {"city": 'Zürich 東京 😀 "q"'})
THOUGHT = "<think>\nfirst 漢\n</think>\n\nthen"
NAMES = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("same"), template=THINKING, context=4096) as running:
        yield running


def whole(server: LiveServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def events(server: LiveServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = server.http.post(path, json=body | {"stream": True})
    assert response.status_code == 200, response.text
    lines = response.content.decode("utf-8", "strict").splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def calls_of(pieces: list[dict[str, Any]]) -> list[tuple[str, str]]:
    calls: list[list[str]] = []
    for piece in pieces:
        if piece["index"] == len(calls):
            calls.append([piece["function"]["name"], ""])
        calls[piece["index"]][1] += piece["function"].get("arguments", "")
    return [(name, arguments) for name, arguments in calls]


CHATS: dict[str, dict[str, Any]] = {
    "plain": {"text": "hello 漢😀 world"},
    "log-probabilities": {"text": "hello 漢😀 world", "logprobs": True, "top_logprobs": 3},
    "several choices": {"text": "a <|random|>", "n": 3, "seed": 5, "max_tokens": 9, "logprobs": True},
    "stop string": {"text": "A B C D E F", "stop": ["C D"], "logprobs": True},
    "limit": {"text": "hello world again", "max_tokens": 3},
    "limit in a character": {"text": "😀😀", "max_tokens": 5, "logprobs": True},
    "thought": {"text": THOUGHT, "logprobs": True},
    "thought in short": {"text": "<think>\n" + "thinking " * 40, "max_tokens": 40},
    "call": {"text": "before " + CALL, "tools": [GET], "logprobs": True},
    "two calls": {"text": CALL + "\n" + CALL, "tools": [GET]},
    "call cut off": {"text": CALL, "tools": [GET], "max_tokens": 30},
    "forced call": {"text": "x", "tools": [GET], "tool_choice": "required", "seed": 3},
    "grammar": {"text": "x", "regex": "[ab]{3}c", "seed": 4, "logprobs": True},
    "least length": {"text": "a b", "min_tokens": 7},
}


@pytest.mark.parametrize("name", CHATS)
def test_chat(server: LiveServer, name: str) -> None:
    fields = dict(CHATS[name])
    body = {"messages": [{"role": "user", "content": fields.pop("text")}], "seed": 1, **fields}
    answer = whole(server, "/v1/chat/completions", body)
    stream = events(server, "/v1/chat/completions", body | {"stream_options": {"include_usage": True}})
    assert stream[-1]["usage"] == answer["usage"]
    assert [event for event in stream if not event["choices"]] == stream[-1:]
    assert {event["id"] for event in stream} == {stream[0]["id"]}
    for choice in answer["choices"]:
        pieces = [c for event in stream for c in event["choices"] if c["index"] == choice["index"]]
        message = choice["message"]
        for key in ("content", "reasoning_content"):
            assert "".join(piece["delta"].get(key) or "" for piece in pieces) == (message.get(key) or "")
        calls = calls_of([call for piece in pieces for call in piece["delta"].get("tool_calls", ())])
        assert calls == [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())]
        assert [piece["finish_reason"] for piece in pieces if piece["finish_reason"]] == [choice["finish_reason"]]
        assert pieces[0]["delta"]["role"] == "assistant"
        entries = [entry for piece in pieces if piece["logprobs"] for entry in piece["logprobs"]["content"]]
        assert entries == (choice["logprobs"]["content"] if choice["logprobs"] else [])


TEXTS: dict[str, dict[str, Any]] = {
    "plain": {"prompt": "hello 漢😀 world"},
    "log-probabilities": {"prompt": "hello 漢😀", "logprobs": 2},
    "echo": {"prompt": "hello", "echo": True},
    "scored echo": {"prompt": "hello 漢", "echo": True, "logprobs": 2},
    "echo alone": {"prompt": "hello 漢", "echo": True, "logprobs": 2, "max_tokens": 0},
    "several prompts": {"prompt": ["one", "two"], "n": 2, "logprobs": 0},
    "stop string": {"prompt": "A B C D E", "stop": "C D", "logprobs": 1},
    "limit": {"prompt": "hello world", "max_tokens": 2, "logprobs": 1},
    "limit in a character": {"prompt": "😀😀", "max_tokens": 5, "logprobs": 1},
}


@pytest.mark.parametrize("name", TEXTS)
def test_text(server: LiveServer, name: str) -> None:
    body = {"max_tokens": 100, "seed": 1, **TEXTS[name]}
    answer = whole(server, "/v1/completions", body)
    stream = events(server, "/v1/completions", body | {"stream_options": {"include_usage": True}})
    assert stream[-1]["usage"] == answer["usage"]
    for choice in answer["choices"]:
        pieces = [c for event in stream for c in event["choices"] if c["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        assert [piece["finish_reason"] for piece in pieces if piece["finish_reason"]] == [choice["finish_reason"]]
        joined = {key: [one for piece in pieces if piece["logprobs"] for one in piece["logprobs"][key]] for key in NAMES}
        assert joined == (choice["logprobs"] or {key: [] for key in NAMES})


NATIVES: dict[str, dict[str, Any]] = {
    "plain": {"prompt": "hello 漢😀 world"},
    "probabilities": {"prompt": "hello 漢😀", "n_probs": 2, "return_tokens": True},
    "after sampling": {"prompt": "hello", "n_probs": 1, "post_sampling_probs": True},
    "stop string": {"prompt": "A B C D E", "stop": ["C D"]},
    "limit": {"prompt": "hello\nworld", "n_predict": 3},
}
TIMED = {"timings", "tokens", "completion_probabilities", "content"}


@pytest.mark.parametrize("name", NATIVES)
def test_llama_servers_text(server: LiveServer, name: str) -> None:
    body = {"seed": 1, **NATIVES[name]}
    answer, stream = whole(server, "/completion", body), events(server, "/completion", body)
    assert "".join(event["content"] for event in stream) == answer["content"]
    assert [id_ for event in stream for id_ in event["tokens"]] == answer["tokens"]
    entries = [entry for event in stream for entry in event.get("completion_probabilities", ())]
    assert entries == answer.get("completion_probabilities", [])
    last = {key: value for key, value in stream[-1].items() if key not in TIMED}
    expected = {key: value for key, value in answer.items() if key not in TIMED}
    assert last["generation_settings"].pop("stream")
    assert not expected["generation_settings"].pop("stream")
    assert last == expected


NEWER: dict[str, dict[str, Any]] = {
    "plain": {"text": "hello 漢😀 world"},
    "thought": {"text": THOUGHT},
    "limit": {"text": "hello world again", "most": 3},
    "call": {"text": "before " + CALL, "tools": True},
}


@pytest.mark.parametrize("name", NEWER)
def test_response(server: LiveServer, name: str) -> None:
    given = NEWER[name]
    body = {"input": given["text"], "seed": 1, "max_output_tokens": given.get("most", 300)}
    if given.get("tools"):
        body["tools"] = [{"type": "function", **GET["function"]}]
    answer, stream = whole(server, "/v1/responses", body), events(server, "/v1/responses", body)
    final = stream[-1]["response"]
    assert stream[-1]["type"] == ("response.incomplete" if name == "limit" else "response.completed")
    assert (final["usage"], final["status"]) == (answer["usage"], answer["status"])
    for left, right in zip(final["output"], answer["output"], strict=True):
        for key in set(left) - {"id", "call_id"}:
            assert left[key] == right[key], key
    for kind, part in (("response.output_text.delta", "output_text"), ("response.reasoning_text.delta", "reasoning_text")):
        texts = [c["text"] for item in answer["output"] for c in item.get("content") or () if c["type"] == part]
        assert "".join(event["delta"] for event in stream if event["type"] == kind) == "".join(texts)
    arguments = "".join(event["delta"] for event in stream if event["type"] == "response.function_call_arguments.delta")
    assert arguments == "".join(item["arguments"] for item in answer["output"] if item["type"] == "function_call")


@pytest.mark.parametrize("name", NEWER)
def test_message(server: LiveServer, name: str) -> None:
    given = NEWER[name]
    body = {"messages": [{"role": "user", "content": given["text"]}], "seed": 1, "max_tokens": given.get("most", 300)}
    if given.get("tools"):
        body["tools"] = [{"name": "get_weather", "input_schema": GET["function"]["parameters"]}]
    answer, stream = whole(server, "/v1/messages", body), events(server, "/v1/messages", body)
    starts = [event["content_block"] for event in stream if event["type"] == "content_block_start"]
    assert [block["type"] for block in starts] == [block["type"] for block in answer["content"]]
    for index, block in enumerate(answer["content"]):
        deltas = [event["delta"] for event in stream if event["type"] == "content_block_delta" and event["index"] == index]
        joined = "".join(delta.get("text") or delta.get("thinking") or delta.get("partial_json") or "" for delta in deltas)
        assert (
            json.loads(joined) == block["input"] if block["type"] == "tool_use" else joined == (block.get("text") or block.get("thinking"))
        )
    end = next(event for event in stream if event["type"] == "message_delta")
    assert end["delta"]["stop_reason"] == answer["stop_reason"]
    assert end["usage"]["output_tokens"] == answer["usage"]["output_tokens"]
    assert stream[0]["message"]["usage"]["input_tokens"] == answer["usage"]["input_tokens"]
