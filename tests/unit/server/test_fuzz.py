"""Bodies nobody would send on purpose: each gets a 4xx or an answer, never a 500, and a neighbour keeps its text."""

from __future__ import annotations

import concurrent.futures
import json
import random
import threading
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from calstack.server.anthropic import MessagesRequest
from calstack.server.responses import ResponsesRequest
from calstack.server.schemas import ChatRequest, CompletionRequest, InfillRequest, NativeRequest
from tests.support.live_server import LiveServer

SCHEMAS = (ChatRequest, CompletionRequest, NativeRequest, InfillRequest, ResponsesRequest, MessagesRequest)
FIELDS = sorted({"unknown", "content", "tokens"}.union(*(schema.__struct_fields__ for schema in SCHEMAS)) - {"n", "n_cmpl", "max_tokens"})
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 3),
        st.sampled_from([-(2**70), -(2**63), 2**31, 2**63, 2**64, 1e-40, -1e308, 1e308]),
        st.floats(-3, 3),
        st.text(max_size=6),
        st.sampled_from(["auto", "none", "tiny", "user", "<|im_end|>", "\x00", "\u202e"]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4) | st.sampled_from(FIELDS), inner, max_size=3)),
    max_leaves=6,
)
BODIES = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4)
ASK = [{"role": "user", "content": "x"}]
BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": ASK, "max_tokens": 3},
    "/v1/completions": {"prompt": "x", "max_tokens": 3},
    "/completion": {"prompt": "x", "n_predict": 3},
    "/completions": {"prompt": "x", "n_predict": 3},
    "/infill": {"input_prefix": "x", "input_suffix": "y", "n_predict": 3},
    "/v1/responses": {"input": "x", "max_output_tokens": 3},
    "/responses": {"input": "x", "max_output_tokens": 3},
    "/v1/messages": {"messages": ASK, "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": ASK},
    "/apply-template": {"messages": ASK},
    "/tokenize": {"content": "x"},
    "/detokenize": {"tokens": [10]},
}
ALLOWED = {200, 400, 404, 413, 501}
NEIGHBOUR = "neighbour 漢 keeps its text"
BASE_TEXTS = [json.dumps(body, ensure_ascii=False).encode() for body in BASES.values()]
EDGES: list[bytes] = [
    b"", b"null", b"[]", b"5", b'"x"', b"{", b"\xff\xfe\x00", b"{}" * 2, b'{"messages":' + b"[" * 4000,
    b'{"unknown":' + b'{"a":' * 4000 + b"1" + b"}" * 4000 + b"}", b'{"messages": 1e999}', b'{"temperature": NaN}',
    b'{"seed": ' + b"9" * 5000 + b"}", b'{"temperature": 0.' + b"1" * 5000 + b"}", b'{"stop": "' + b"\\u0000" * 500 + b'"}',
    b'{"prompt": "\\ud83d"}', b'{"prompt": "\xed\xa0\x80"}', b'{"tokens": [' + b"1," * 5000 + b"1]}", b"\xef\xbb\xbf{}",
]  # fmt: skip


@pytest.mark.parametrize("path", sorted(BASES))
@given(body=BODIES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_odd_fields_never_break_the_server(server: LiveServer, path: str, body: dict[str, Any]) -> None:
    response = server.http.post(path, json=BASES[path] | body)
    assert response.status_code in ALLOWED, (response.text, body)
    if response.status_code != 200:
        error = response.json()["error"]
        assert error["message"]
        assert path.startswith("/v1/messages") or error["code"] == response.status_code


def odd_body(rng: random.Random) -> bytes:
    """A damaged, spliced or strange body."""
    draw = rng.random()
    if draw < 0.1:
        return rng.choice(EDGES)
    body = bytearray(rng.choice(BASE_TEXTS))
    if draw < 0.4:
        for _ in range(rng.randint(1, 4)):
            body[rng.randrange(len(body))] = rng.randrange(256)
    elif draw < 0.55:
        del body[rng.randrange(len(body)) :]
    elif draw < 0.7:
        at = rng.randrange(len(body))
        body[at:at] = rng.choice(EDGES)
    else:
        fields = json.loads(bytes(body))
        for _ in range(rng.randint(1, 3)):
            fields[rng.choice(FIELDS)] = odd_value(rng, rng.randint(0, 4))
        return json.dumps(fields).encode()
    return bytes(body)


def odd_value(rng: random.Random, depth: int) -> Any:
    if depth and rng.random() < 0.4:
        inner = [odd_value(rng, depth - 1) for _ in range(rng.randint(0, 3))]
        return inner if rng.random() < 0.5 else {rng.choice([*FIELDS, "type", "schema", "role", "text"]): value for value in inner}
    texts = ["", "x", "auto", "none", "json_schema", "json_object", "object", "user", "漢\u202e\x00", "a" * 300, "(", "root ::= (", "^a+$"]
    numbers = [0, -1, 1, 3, 2**31, 2**63, -(2**63), 2**64, 2**70, 0.5, -0.0, 1e-320, 1e308, -1e308]
    return rng.choice([None, True, False, *texts, *numbers])


def storm(server: LiveServer, count: int, seed: int) -> None:
    """Send odd bodies from four clients while a neighbour streams over and over: no 500, no hang, the neighbour keeps its text."""
    stop = threading.Event()

    def neighbour() -> int:
        rounds = 0
        while not (stop.is_set() and rounds):
            events = server.events("/v1/completions", prompt="<|slow|>" + NEIGHBOUR, max_tokens=60)
            assert "".join(event["choices"][0]["text"] for event in events) == NEIGHBOUR
            rounds += 1
        return rounds

    def client(number: int) -> None:
        rng = random.Random(f"{seed}/{number}")
        for _ in range(count // 4):
            path, body = rng.choice(sorted(BASES)), odd_body(rng)
            response = server.http.post(path, content=body)  # a hang is a time-out
            assert response.status_code in ALLOWED, (path, body, response.text)
            if response.status_code >= 400:
                assert response.json()["error"]["message"]

    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        beside = pool.submit(neighbour)
        try:
            list(pool.map(client, range(4)))
        finally:
            stop.set()
        assert beside.result() >= 1
    server.assert_idle_soon(10)
    server.assert_alive()


def test_odd_bodies_never_break_the_server_nor_a_neighbour(server: LiveServer) -> None:
    storm(server, 600, 3)


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_ten_thousand_odd_bodies_never_break_the_server_nor_a_neighbour(server: LiveServer) -> None:
    storm(server, 10_000, 5)
