"""n, seeds, usage chunks, timings: through the official client where it can say it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from calstack.server.config import LimitsConfig
from tests.support.live_server import LiveServer, live_server

HELLO = [{"role": "user", "content": "hello"}]


def test_chat_answers_through_the_official_client(server: LiveServer) -> None:
    answer = server.openai.chat.completions.create(model="tiny", messages=HELLO)
    assert answer.choices[0].message.content == "hello"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_every_index_has_one_role_chunk_first_and_one_finish_chunk_last(server: LiveServer) -> None:
    chunks = list(server.openai.chat.completions.create(model="tiny", messages=HELLO, n=3, stream=True))
    assert len({(chunk.id, chunk.created, chunk.model, chunk.system_fingerprint) for chunk in chunks}) == 1
    for index in range(3):
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert [choice.delta.role for choice in mine] == ["assistant", *[None] * (len(mine) - 1)]
        assert [choice.finish_reason for choice in mine] == [*[None] * (len(mine) - 1), "stop"]
        assert "".join(choice.delta.content or "" for choice in mine) == "hello"


@pytest.mark.parametrize("n", [2, 3])
def test_choices_differ_by_their_draw_and_repeat_with_the_seed(server: LiveServer, n: int) -> None:
    def texts(seed: int) -> list[str]:
        answer = server.complete("<|random|>x", n=n, seed=seed, max_tokens=8, temperature=1).json()
        assert [choice["index"] for choice in answer["choices"]] == list(range(n))
        assert answer["usage"]["completion_tokens"] == 8 * n
        return [choice["text"] for choice in answer["choices"]]

    first = texts(1)
    assert len(set(first)) == n
    assert texts(1) == first
    assert texts(2) != first


def test_a_seed_is_drawn_when_none_is_given(server: LiveServer) -> None:
    texts = {server.complete("<|random|>x", max_tokens=8).json()["choices"][0]["text"] for _ in range(4)}
    assert len(texts) == 4


def test_each_prompt_of_a_list_draws_as_it_would_alone(server: LiveServer) -> None:
    alone = server.complete("<|random|>x", seed=5, max_tokens=8).json()["choices"][0]["text"]
    both = server.complete(["<|random|>y", "<|random|>x"], seed=5, max_tokens=8).json()["choices"]
    assert both[1]["text"] == alone


@pytest.mark.parametrize(("options", "expected"), [({"include_usage": True}, 1), ({"include_usage": False}, 0), ({}, 0), (None, 0)])
@pytest.mark.parametrize("n", [1, 2])
def test_usage_chunk_comes_once_and_only_when_asked_for(server: LiveServer, options: Any, expected: int, n: int) -> None:
    events = server.events("/v1/chat/completions", messages=HELLO, n=n, stream_options=options)
    assert sum("usage" in event for event in events) == expected
    assert sum(event["choices"] == [] for event in events) == expected
    if expected:
        assert events[-1]["usage"] == server.chat("hello", n=n).json()["usage"]


def test_timings_come_on_request_and_are_finite(server: LiveServer) -> None:
    timings = server.chat("hello", timings=True).json()["timings"]
    assert timings["predicted_n"] == len(server.post("/tokenize", content="hello").json()["tokens"]) + 1
    assert all(isinstance(value, int | float) for value in timings.values())
    assert "timings" not in server.chat("hello").json()
    last = server.events("/v1/chat/completions", messages=HELLO, timings_per_token=True)[-1]
    assert last["timings"]["prompt_n"] == timings["prompt_n"]


def test_trailing_assistant_message_is_continued(server: LiveServer) -> None:
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Sure, "}]
    prefilled = server.post("/v1/chat/completions", messages=messages).json()["usage"]["prompt_tokens"]
    closed = server.post("/v1/chat/completions", messages=messages, add_generation_prompt=True).json()["usage"]["prompt_tokens"]
    assert closed > prefilled
    twice = server.post("/v1/chat/completions", messages=[*messages, messages[-1]])
    assert twice.status_code == 400
    both = server.post("/v1/chat/completions", messages=messages, continue_final_message=True, add_generation_prompt=True)
    assert both.status_code == 400


def test_stop_token_id_ends_without_its_text(server: LiveServer) -> None:
    ids = server.post("/tokenize", content="hello world").json()["tokens"]
    choice = server.chat("hello world", stop_token_ids=[ids[-1]]).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == server.post("/detokenize", tokens=ids[: ids.index(ids[-1])]).json()["content"]


def test_ignore_eos_goes_on_to_the_limit(server: LiveServer) -> None:
    choice = server.chat("hi", ignore_eos=True, max_tokens=9).json()["choices"][0]
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "n_predict"])
def test_limit_has_three_names(server: LiveServer, name: str) -> None:
    assert server.chat("hello world", **{name: 1}).json()["usage"]["completion_tokens"] == 1
    assert server.chat("hello world", **{name: -1}).json()["choices"][0]["finish_reason"] == "stop"


def test_models_are_listed_and_found_by_name(server: LiveServer) -> None:
    models = list(server.openai.models.list())
    assert [model.id for model in models] == ["tiny"]
    assert server.openai.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        server.openai.models.retrieve("other")


def test_request_id_is_kept_when_it_is_sane(server: LiveServer) -> None:
    assert server.http.get("/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    made = server.http.get("/health", headers={"x-request-id": "a b"}).headers["x-request-id"]
    assert made != "a b"
    assert len({server.http.get("/health").headers["x-request-id"] for _ in range(3)}) == 3


def test_silence_in_a_stream_is_filled_with_comments(tmp_path: Path) -> None:
    with live_server(tmp_path, limits=LimitsConfig(keepalive_s=0.005)) as server:
        body = {"prompt": "<|slow|>abc", "max_tokens": 3, "stream": True}
        blocks = server.http.post("/v1/completions", json=body).text.split("\n\n")
        assert ":" in blocks
        assert blocks[0].startswith("data: ")  # nothing before the first token: the status is held for it
        assert blocks[-2:] == ["data: [DONE]", ""]


def test_least_length_holds_ends_and_stop_strings_back(server: LiveServer) -> None:
    free = server.complete("a b c d", stop=["b"]).json()["choices"][0]
    assert (free["text"], free["finish_reason"]) == ("a ", "stop")
    held = server.complete("a b c d", stop=["b"], min_tokens=9).json()
    assert held["choices"][0]["text"].startswith("a b c d")
    assert held["usage"]["completion_tokens"] >= 9


def test_least_length_is_bounded_and_takes_no_constraint(server: LiveServer) -> None:
    for body in ({"min_tokens": 5, "max_tokens": 4}, {"min_tokens": 2, "regex": "a+"}):
        response = server.complete("x", **body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "min_tokens")
    server.assert_alive()
