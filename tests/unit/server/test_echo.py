"""Log-probabilities of echoed prompts, as scoring clients read them; fewest tokens; fields that are taken and mean little here."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.live_server import LiveServer
from tests.support.tiny_model import special


def logprobs_of(server: LiveServer, stream: bool, **body: Any) -> tuple[str, dict[str, list[Any]]]:
    """Text and parallel lists of the first choice."""
    if not stream:
        choice = server.post("/v1/completions", **body).json()["choices"][0]
        return choice["text"], choice["logprobs"]
    lists: dict[str, list[Any]] = {}
    text = ""
    for event in server.events("/v1/completions", **body):
        choice = event["choices"][0]
        text += choice["text"]
        for name, values in (choice["logprobs"] or {}).items():
            lists.setdefault(name, []).extend(values)
    return text, lists


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 50])
@pytest.mark.parametrize("prompt", ["the quick fox", "漢😀 of two", "x"])
def test_every_token_of_prompt_and_answer_has_its_place(server: LiveServer, prompt: str, max_tokens: int, stream: bool) -> None:
    ids = server.post("/tokenize", content=prompt).json()["tokens"]
    text, found = logprobs_of(server, stream, prompt=prompt, echo=True, logprobs=2, max_tokens=max_tokens)
    answer = text.removeprefix(prompt)
    assert text.startswith(prompt)
    assert len({len(values) for values in found.values()}) == 1
    assert len(found["tokens"]) - len(ids) == (
        max_tokens if max_tokens < 2 else len(server.post("/tokenize", content=answer).json()["tokens"])
    )
    assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
    assert found["token_logprobs"][1 : len(ids)] == [-(id_ % 7) / 4 for id_ in ids[1:]]
    assert all(token in tops for token, tops in zip(found["tokens"][1:], found["top_logprobs"][1:], strict=True))
    assert found["text_offset"] == sorted(found["text_offset"])
    for token, start in zip(found["tokens"], found["text_offset"], strict=True):
        if not token.startswith("bytes:"):
            assert text[start : start + len(token)] == token


def test_prompt_of_ids_is_scored_id_by_id_as_evaluation_harnesses_send_it(server: LiveServer) -> None:
    ids = server.post("/tokenize", content="the quick brown fox 漢").json()["tokens"]
    answer = server.post("/v1/completions", prompt=[ids, ids[:4]], echo=True, logprobs=1, max_tokens=1, temperature=0).json()
    for choice, sent in zip(answer["choices"], (ids, ids[:4]), strict=True):
        assert len(choice["logprobs"]["token_logprobs"]) == len(sent) + 1
        assert choice["logprobs"]["token_logprobs"][1:-1] == [-(id_ % 7) / 4 for id_ in sent[1:]]
    assert answer["choices"][0]["text"].startswith("the quick brown fox 漢")


def test_bos_that_the_text_does_not_show_takes_no_room(server: LiveServer) -> None:
    bos = special("<|im_start|>")
    ids = server.post("/tokenize", content="fox").json()["tokens"]
    shown = logprobs_of(server, False, prompt=[bos, *ids], echo=True, logprobs=0, max_tokens=0)
    assert shown[0] == "<|im_start|>fox"
    assert shown[1]["text_offset"][:2] == [0, len("<|im_start|>")]


def test_each_choice_has_its_echo(server: LiveServer) -> None:
    answer = server.post("/v1/completions", prompt=["ab", "cd"], n=2, echo=True, logprobs=0, max_tokens=0).json()
    assert [choice["text"] for choice in answer["choices"]] == ["ab", "ab", "cd", "cd"]
    assert all(choice["logprobs"]["token_logprobs"][0] is None for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 0


def test_answer_goes_on_after_a_crash_and_the_prompt_is_not_given_twice(server: LiveServer) -> None:
    text, found = logprobs_of(server, True, prompt="abcdef<|crash|>", echo=True, logprobs=0, max_tokens=20)
    assert text == "abcdef<|crash|>abcdef"
    assert found["token_logprobs"].count(None) == 1
    server.assert_alive()


def test_without_echo_the_prompt_has_no_log_probabilities(server: LiveServer) -> None:
    _, found = logprobs_of(server, False, prompt="the fox", logprobs=1)
    assert found["text_offset"][0] == 0
    assert None not in found["token_logprobs"]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"min_tokens": -1}, 400, "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, 400, "min_tokens"),
        ({"min_tokens": "2"}, 400, "min_tokens"),
        ({"suffix": "x"}, 501, None),
        ({"best_of": 3}, 400, "best_of"),
        ({"best_of": 1}, 200, None),
        ({"suffix": ""}, 200, None),
        ({"user": "u", "metadata": {"a": "b"}, "prompt_cache_key": "k"}, 200, None),
        ({"user": 3}, 400, "user"),
        ({"metadata": {"a": 3}}, 400, "metadata[...]"),
        ({"metadata": {str(n): "" for n in range(17)}}, 400, "metadata"),
        ({"metadata": {"a": "b" * 513}}, 400, "metadata"),
        ({"prompt_cache_key": "k" * 1025}, 400, "prompt_cache_key"),
        ({"cache_salt": "k" * 1025}, 400, "cache_salt"),
    ],
)
def test_field_is_taken_or_refused_by_name(server: LiveServer, body: dict[str, Any], status: int, param: str | None) -> None:
    response = server.complete("hello", **body)
    assert response.status_code == status, response.text
    if status == 400:
        error = response.json()["error"]
        assert (error["param"] or "").split("[")[0] == (param or "").split("[")[0]


def test_stop_strings_do_not_end_an_answer_before_its_fewest_tokens(server: LiveServer) -> None:
    assert server.complete("abcabcabc", stop="b").json()["choices"][0]["text"] == "a"
    text = server.complete("abcabcabc", stop="b", min_tokens=4).json()["choices"][0]["text"]
    assert text == "abca"  # four tokens, the second of them the stop string


@pytest.mark.parametrize("name", ["cache_salt", "prompt_cache_key"])
def test_salts_and_keys_are_part_of_the_prefix_caches_key(server: LiveServer, name: str) -> None:
    seen: dict[str, str] = {}
    accept = server.context.journal.accept

    def watched(submit: Any, sink: Any) -> Any:
        seen[submit.request] = submit.cache_salt
        return accept(submit, sink)

    server.context.journal.accept = watched  # type: ignore[method-assign]
    try:
        for value in (None, "", "a", "b", "a"):
            server.complete("x", **{name: value})
        server.complete("x", cache_salt="a", prompt_cache_key="b")
        server.complete("x", cache_salt="b", prompt_cache_key="a")
    finally:
        server.context.journal.accept = accept  # type: ignore[method-assign]
    none, empty, a, b, again, ab, ba = seen.values()
    assert (none, empty, a) == ("", "", again)
    assert len({"", a, b, ab, ba}) == 5
