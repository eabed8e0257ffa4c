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
