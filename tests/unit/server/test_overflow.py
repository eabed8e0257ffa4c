"""Requests longer than the context: what each overflow policy makes of them, on every route that takes one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.live_server import LiveServer

LONG = "word " * 2000


def asked(server: LiveServer) -> dict[str, Any]:
    """What the engine was given last."""
    return [line for line in server.engine_log() if line["what"] == "submit"][-1]


def test_too_long_is_refused_unless_said_otherwise(server: LiveServer) -> None:
    for body in ({}, {"overflow": "reject"}, {"overflow": None}):
        answer = server.complete(LONG, **body)
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "exceed_context_size_error"


@pytest.mark.parametrize("policy", ["truncate", "shift"])
def test_the_oldest_ids_go_and_the_answer_says_how_many(server: LiveServer, policy: str) -> None:
    ids = server.post("/tokenize", content=LONG).json()["tokens"]
    context = server.http.get("/props").json()["default_generation_settings"]["n_ctx"]
    answer = server.complete(LONG, overflow=policy, n_keep=3, max_tokens=4).json()
    gone = len(ids) + 4 - context
    assert answer["overflow"] == {"policy": policy, "prompt_tokens_dropped": gone, "shifts": 0}
    assert answer["usage"]["prompt_tokens"] == context - 4
    assert asked(server)["prompt"] == [*ids[:3], *ids[3 + gone :]]
    assert asked(server)["keep"] == (3 if policy == "shift" else 0)
    streamed = server.events("/v1/completions", prompt=LONG, overflow=policy, n_keep=3, max_tokens=4, stream=True)
    assert streamed[-1]["overflow"] == answer["overflow"]


def test_chat_native_and_responses_say_it_too(server: LiveServer) -> None:
    chat = server.chat(LONG, overflow="truncate", max_tokens=4).json()
    assert chat["overflow"]["prompt_tokens_dropped"] > 0
    native = server.post("/completion", prompt=LONG, overflow="truncate", n_predict=4).json()
    assert native["truncated"] is True
    assert native["overflow"]["prompt_tokens_dropped"] > 0
    assert server.post("/completion", prompt="hi", overflow="truncate", n_predict=4).json()["truncated"] is False
    whole = server.post("/v1/responses", input=LONG, truncation="auto", max_output_tokens=4).json()
    assert whole["truncation"] == "auto"
    assert server.post("/v1/responses", input=LONG, truncation="disabled", max_output_tokens=4).status_code == 400


def test_a_shifting_answer_may_be_longer_than_the_context(server: LiveServer) -> None:
    context = server.http.get("/props").json()["default_generation_settings"]["n_ctx"]
    answer = server.complete("a b c", overflow="shift", max_tokens=context + 100, ignore_eos=True).json()
    assert answer["usage"]["completion_tokens"] == context + 100


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"overflow": "wrap"}, "overflow"),
        ({"overflow": "shift", "n_keep": -2}, "n_keep"),
        ({"overflow": "shift", "n_keep": 2000}, "n_keep"),
    ],
)
def test_what_cannot_be_is_refused_by_name(server: LiveServer, body: dict[str, Any], param: str) -> None:
    answer = server.complete(LONG, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_responses_truncation_is_auto_or_disabled(server: LiveServer) -> None:
    answer = server.post("/v1/responses", input="hi", truncation="some")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "truncation")
