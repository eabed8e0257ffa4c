"""Trials B: log-probabilities in both shapes and both modes."""

from __future__ import annotations

import openai
import pytest

from tests.support.live_server import LiveServer


def test_bytes_of_split_characters_join_to_the_text(server: LiveServer) -> None:
    choice = server.chat("漢😀", logprobs=True, top_logprobs=2).json()["choices"][0]
    entries = choice["logprobs"]["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]) == choice["message"]["content"].encode() == "漢😀".encode()
    assert len(entries) == 7
    assert all(entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 2 for entry in entries)


def test_chat_logprobs_have_one_shape_in_stream_and_whole(server: LiveServer) -> None:
    client: openai.OpenAI = server.openai
    messages = [{"role": "user", "content": "the quick fox"}]
    whole = client.chat.completions.create(model="tiny", messages=messages, logprobs=True, top_logprobs=3)
    entries = whole.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == whole.choices[0].message.content
    chunks = list(client.chat.completions.create(model="tiny", messages=messages, logprobs=True, top_logprobs=3, stream=True))
    streamed = [entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert streamed == entries
    assert chunks[0].choices[0].logprobs is None
    assert chunks[-1].choices[0].logprobs is None


def test_chunk_with_held_back_character_carries_all_its_tokens(server: LiveServer) -> None:
    events = server.events("/v1/chat/completions", messages=[{"role": "user", "content": "漢"}], logprobs=True)
    texts = [event["choices"][0] for event in events if event["choices"][0]["logprobs"]]
    assert [(choice["delta"]["content"], len(choice["logprobs"]["content"])) for choice in texts] == [("漢", 3)]


def test_logprobs_end_where_a_stop_string_cuts(server: LiveServer) -> None:
    choice = server.chat("A B C D E", logprobs=True, stop=["C D"]).json()["choices"][0]
    assert "".join(entry["token"] for entry in choice["logprobs"]["content"]).startswith("A B")
    assert "D" not in "".join(entry["token"] for entry in choice["logprobs"]["content"])


def test_completion_logprobs_are_parallel_lists_with_offsets(server: LiveServer) -> None:
    choice = server.openai.completions.create(model="tiny", prompt="The sky", logprobs=3, max_tokens=4).choices[0]
    logprobs = choice.logprobs
    assert "".join(logprobs.tokens) == choice.text
    assert [choice.text[at : at + len(token)] for at, token in zip(logprobs.text_offset, logprobs.tokens, strict=True)] == logprobs.tokens
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 4
    assert all(token in tops for token, tops in zip(logprobs.tokens, logprobs.top_logprobs, strict=True))


@pytest.mark.parametrize("body", [{"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 21}, {"logprobs": True, "top_logprobs": -1}])
def test_top_logprobs_out_of_range_or_alone_is_a_400(server: LiveServer, body: dict) -> None:
    response = server.chat("x", **body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "top_logprobs"


def test_logprobs_are_absent_unless_asked_for(server: LiveServer) -> None:
    assert server.chat("x").json()["choices"][0]["logprobs"] is None
    assert server.complete("x").json()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("limit", [0, 1, 4])
def test_echoed_prompt_carries_its_scores_before_the_answer(server: LiveServer, stream: bool, limit: int) -> None:
    ids = server.post("/tokenize", content="the sky 漢").json()["tokens"]
    body = {"prompt": ids, "echo": True, "logprobs": 2, "max_tokens": limit}
    if stream:
        choices = [event["choices"][0] for event in server.events("/v1/completions", **body)]
    else:
        choices = server.post("/v1/completions", **body).json()["choices"]
    names = ["tokens", "token_logprobs", "top_logprobs", "text_offset"]
    joined = {name: [one for choice in choices if choice["logprobs"] for one in choice["logprobs"][name]] for name in names}
    assert "".join(choice["text"] for choice in choices).startswith("the sky 漢")
    assert [len(joined[name]) for name in names] == [len(ids) + limit] * 4
    assert joined["token_logprobs"][0] is joined["top_logprobs"][0] is None
    assert all(value <= 0 for value in joined["token_logprobs"][1:])
    assert all(len(tops) >= 2 for tops in joined["top_logprobs"][1:])
    assert joined["text_offset"] == sorted(joined["text_offset"])
    assert joined["text_offset"][len(ids) :][:1] == [len("the sky 漢")][:limit]
    assert choices[-1]["finish_reason"] == "length"


def test_scores_of_each_prompt_stand_with_it(server: LiveServer) -> None:
    choices = server.complete(["the", "hello world"], echo=True, logprobs=0, max_tokens=0, n=2).json()["choices"]
    counts = [len(choice["logprobs"]["tokens"]) for choice in choices]
    assert counts == [counts[0], counts[0], counts[2], counts[2]]
    assert [choice["text"] for choice in choices] == ["the", "the", "hello world", "hello world"]


def test_scored_prompt_alone_costs_no_output_tokens(server: LiveServer) -> None:
    answer = server.complete("the sky", echo=True, logprobs=1, max_tokens=0).json()
    assert answer["usage"]["completion_tokens"] == 0
    server.assert_alive()
