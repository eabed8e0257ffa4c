"""llama-server's own routes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.live_server import LiveServer


def pieces(server: LiveServer, **body: Any) -> list[dict[str, Any]]:
    response = server.http.post("/completion", json={**body, "stream": True})
    assert response.status_code == 200, response.text
    blocks = response.text.split("\n\n")
    assert blocks[-1] == ""
    assert "[DONE]" not in response.text
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]


def test_stop_over_tokens_names_its_word_and_leaks_nothing(server: LiveServer) -> None:
    answer = server.post("/completion", prompt="A B C D E F G", stop=["C D E"]).json()
    assert (answer["content"], answer["stop_type"], answer["stopping_word"]) == ("A B ", "word", "C D E")
    events = pieces(server, prompt="A B C D E F G", stop=["C D E"])
    assert "".join(event["content"] for event in events) == "A B "
    assert (events[-1]["stop"], events[-1]["stopping_word"]) == (True, "C D E")


@pytest.mark.parametrize(("limit", "kind"), [(2, "limit"), (-1, "eos")])
def test_final_fields_are_llama_servers(server: LiveServer, limit: int, kind: str) -> None:
    answer = server.post("/completion", prompt="hello world", n_predict=limit, seed=7, return_tokens=True).json()
    assert answer["stop_type"] == kind
    assert answer["generation_settings"]["seed"] == 7
    assert answer["prompt"] == "hello world"
    assert answer["tokens"]
    assert {"tokens_predicted", "tokens_evaluated", "truncated", "timings", "tokens_cached", "id_slot", "model"} <= set(answer)
    assert "completion_probabilities" not in answer


def test_tokens_only_where_asked_for(server: LiveServer) -> None:
    assert server.post("/completion", prompt="hello").json()["tokens"] == []


def test_text_ids_and_mixed_prompts_give_the_same_text_and_several_an_array(server: LiveServer) -> None:
    ids = server.post("/tokenize", content="hello world").json()["tokens"]
    answers = server.post("/completion", prompt=["hello world", ids, ["hello", *ids[len(ids) - 1 :]]]).json()
    assert [answer["index"] for answer in answers] == [0, 1, 2]
    assert answers[0]["content"] == answers[1]["content"] == "hello world"
    assert server.post("/completion", prompt={"prompt_string": "hello world"}).json()["content"] == "hello world"


def test_probabilities_have_one_entry_per_token(server: LiveServer) -> None:
    answer = server.post("/completion", prompt="漢😀", n_probs=2).json()
    entries = answer["completion_probabilities"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries) == "漢😀".encode()
    assert all(entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 2 for entry in entries)
    after = server.post("/completion", prompt="漢😀", n_probs=2, post_sampling_probs=True).json()["completion_probabilities"]
    assert all(0 < entry["prob"] <= 1 and len(entry["top_probs"]) == 2 for entry in after)


def test_only_the_fields_asked_for(server: LiveServer) -> None:
    answer = server.post("/completion", prompt="x", response_fields=["content", "generation_settings/n_predict", "nothing"]).json()
    assert answer == {"content": "x", "generation_settings/n_predict": -1}


def test_grammar_bounds_the_answer(server: LiveServer) -> None:
    assert server.post("/completion", prompt="x", grammar='root ::= "a😀漢🇫🇷é b"').json()["content"] == "a😀漢🇫🇷é b"


def test_prompt_beyond_the_context_is_a_400_with_numbers(server: LiveServer) -> None:
    for stream in (False, True):
        response = server.post("/completion", prompt="漢" * 600, stream=stream)
        assert response.status_code == 400
        assert response.json()["error"]["n_ctx"] == 512


def test_template_is_applied_and_developer_is_system(server: LiveServer) -> None:
    def prompt(role: str) -> str:
        messages = [{"role": role, "content": "be brief <|im_end|>"}, {"role": "user", "content": "hi"}]
        response = server.post("/apply-template", messages=messages)
        assert response.status_code == 200, response.text
        return str(response.json()["prompt"])

    assert prompt("developer") == prompt("system")
    assert "be brief <|im_end|>" in prompt("system")
    count = server.post("/v1/chat/completions/input_tokens", messages=[{"role": "user", "content": "hi"}]).json()
    assert count["input_tokens"] > 3


def test_props_and_slots_tell_of_model_and_device(server: LiveServer) -> None:
    props = server.http.get("/props").json()
    assert (props["total_slots"], props["device"], props["default_generation_settings"]["n_ctx"]) == (4, "fake", 512)
    assert props["eos_token"] == "<|im_end|>"
    slots = server.http.get("/slots").json()
    assert [slot["id"] for slot in slots] == [0, 1, 2, 3]
    assert not any(slot["is_processing"] for slot in slots)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/lora-adapters", None),
        ("POST", "/lora-adapters", [{"id": 0, "scale": 1}]),
        ("POST", "/slots/0?action=save", {"filename": "x"}),
        ("POST", "/v1/embeddings", {"input": "x"}),
        ("POST", "/v1/rerank", {"query": "x", "documents": ["y"]}),
        ("POST", "/v1/score", {"text_1": "x", "text_2": "y"}),
        ("POST", "/infill", {"input_prefix": "a", "input_suffix": "b"}),
    ],
)
def test_what_the_calbin_lacks_is_a_501(server: LiveServer, method: str, path: str, body: Any) -> None:
    response = server.http.request(method, path, json=body)
    assert response.status_code == 501
    assert response.json()["error"]["type"] == "not_supported_error"


@pytest.mark.parametrize(
    "extra", [{}, "ok", {"filename": "ok"}, [{"filename": 123}], [{"filename": 123, "text": "abc"}], [{"filename": "x"}]]
)
def test_odd_extra_of_infill_is_a_400(server: LiveServer, extra: Any) -> None:
    assert server.post("/infill", input_prefix="a", input_suffix="b", input_extra=extra).status_code == 400
