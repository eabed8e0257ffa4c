"""Trials that no other file holds: edges of fields over every generating route, and what the server is like after many aborts."""

from __future__ import annotations

import concurrent.futures
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from calstack.server.config import LimitsConfig
from tests.support.live_server import LiveServer, live_server
from tests.unit.server.test_lifecycle import eventually, raw

LONG = "z" * 600
GENERATING: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}]},
    "/v1/completions": {"prompt": LONG},
    "/completion": {"prompt": LONG},
    "/v1/responses": {"input": LONG},
    "/v1/messages": {"messages": [{"role": "user", "content": LONG}], "max_tokens": 5},
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", sorted(GENERATING))
def test_prompt_beyond_the_context_is_a_400_with_its_numbers(server: LiveServer, path: str, stream: bool) -> None:
    response = server.http.post(path, json=GENERATING[path] | {"stream": stream})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["message"]
    if path != "/v1/messages":  # Anthropic's shape holds the numbers in its message
        assert (error["n_prompt_tokens"] >= 600, error["n_ctx"]) == (True, 512)
    else:
        assert "512" in error["message"]
    server.assert_alive()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 10**6}),
        ("/v1/completions", {"prompt": "x", "logprobs": 10**6}),
        ("/v1/completions", {"prompt": "x", "logprobs": -1}),
        ("/v1/completions", {"prompt": "x", "echo": True, "logprobs": 21}),
        ("/completion", {"prompt": "x", "n_probs": 10**6}),
        ("/completion", {"prompt": "x", "n_probs": -1}),
        ("/completion", {"prompt": "x", "stop_token_ids": [10**9]}),
        ("/v1/completions", {"prompt": "x", "stop_token_ids": [None]}),
        ("/v1/completions", {"prompt": "x", "stop_token_ids": [-1]}),
        ("/v1/completions", {"prompt": "x", "logit_bias": {"999999999": 5}}),
        ("/completion", {"prompt": "x", "logit_bias": [[-1, 5]]}),
        ("/v1/completions", {"prompt": "x", "temperature": -1}),
        ("/v1/completions", {"prompt": "x", "n": 0}),
        ("/completion", {"prompt": "x", "n_predict": -2}),
    ],
)
def test_field_out_of_range_is_a_400_on_every_route(server: LiveServer, path: str, body: dict[str, Any]) -> None:
    response = server.http.post(path, json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].split("[")[0] in body
    server.assert_alive()


@pytest.mark.parametrize("stop", ["", [""], ["", "zzz"], None, []])
@pytest.mark.parametrize("path", ["/completion", "/v1/completions"])
def test_empty_stop_never_empties_an_answer(server: LiveServer, path: str, stop: Any) -> None:
    answer = server.http.post(path, json={"prompt": "some text", "stop": stop}).json()
    assert (answer["content"] if path == "/completion" else answer["choices"][0]["text"]) == "some text"


def test_empty_stop_sequence_of_a_message_never_empties_it(server: LiveServer) -> None:
    body = {"messages": [{"role": "user", "content": "some text"}], "max_tokens": 50, "stop_sequences": ["", "zzz"]}
    assert server.http.post("/v1/messages", json=body).json()["content"][0]["text"] == "some text"


def deep(levels: int) -> Any:
    return json.loads('{"items":' * levels + "{}" + "}" * levels)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": deep(60)}}]},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": deep(60)}}},
        {"json_schema": deep(60)},
        {"json_schema": json.dumps(deep(500))},
        {"unknown": deep(60)},
        {"grammar": "root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000},
        {"regex": "(" * 60_000 + "a" + ")" * 60_000},
    ],
    ids=["tools", "response_format", "json_schema", "schema text", "unknown", "grammar", "regex"],
)
def test_deep_nesting_anywhere_is_answered_within_bounds(server: LiveServer, fields: dict[str, Any]) -> None:
    response = server.chat("x", max_tokens=3, **fields)
    assert response.status_code in ({200} if set(fields) & {"unknown"} else {200, 400}), response.text
    server.assert_alive()


def test_messages_that_say_nothing_are_answered_at_once(server: LiveServer) -> None:
    for messages in ([{"role": "user", "content": ""}], [], [{"role": "system", "content": "s"}], [{"role": "user", "content": []}]):
        response = server.http.post("/v1/chat/completions", json={"messages": messages}, timeout=10)
        assert response.status_code == (200 if messages else 400)
    server.assert_alive()


def test_aborts_that_race_with_the_end_leave_no_zombie_and_no_error(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(61)

    def one(number: int) -> None:
        sock = raw(server, "/v1/completions", {"prompt": "<|slow|>abcdefgh", "max_tokens": 8, "stream": number % 2 == 0})
        time.sleep(rng.random() * 0.3)
        sock.close()

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(200)))
    eventually(server.idle)
    assert not [record for record in caplog.records if record.levelname in {"ERROR", "CRITICAL"}]
    server.assert_alive()


def test_two_hundred_at_once_against_a_queue_of_eight(tmp_path: Path) -> None:
    with live_server(tmp_path, limits=LimitsConfig(max_queued_requests=8), lanes=2) as server:

        def one(_: int) -> tuple[int, str | None]:
            response = server.http.post("/v1/completions", json={"prompt": "<|slow|>hello", "max_tokens": 3})
            return response.status_code, response.headers.get("retry-after")

        with concurrent.futures.ThreadPoolExecutor(50) as pool:
            answers = list(pool.map(one, range(200)))
        assert {code for code, _ in answers} == {200, 429}
        assert all(retry and int(retry) >= 1 for code, retry in answers if code == 429)
        assert server.context.admission.refused == sum(code == 429 for code, _ in answers)
        server.assert_idle_soon()


def test_adapters_are_refused_by_name_on_every_route(server: LiveServer) -> None:
    assert server.http.get("/lora-adapters").status_code == 501
    for path, body in GENERATING.items():
        if path not in {"/v1/responses", "/v1/messages"}:
            response = server.http.post(path, json=body | {"lora": [{"id": 0, "scale": 1}]})
            assert response.status_code == 501
            assert "adapter" in response.json()["error"]["message"]
