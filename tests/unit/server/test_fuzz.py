"""Bodies nobody would send on purpose: each gets a 4xx or an answer, never a 500, and a neighbour keeps its text."""

from __future__ import annotations

import concurrent.futures
import json
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from calstack.server.schemas import ChatRequest, CompletionRequest
from tests.support.live_server import LiveServer

FIELDS = sorted({*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__, "unknown"} - {"n", "max_tokens"})
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
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3},
    "/v1/completions": {"prompt": "x", "max_tokens": 3},
    "/tokenize": {"content": "x"},
    "/detokenize": {"tokens": [10]},
}


@pytest.mark.parametrize("path", sorted(ROUTES))
@given(body=BODIES)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_odd_fields_never_break_the_server(server: LiveServer, path: str, body: dict[str, Any]) -> None:
    response = server.http.post(path, json=ROUTES[path] | body)
    assert response.status_code in {200, 400, 404, 501}, (response.text, body)
    if response.status_code != 200:
        error = response.json()["error"]
        assert error["message"]
        assert error["code"] == response.status_code


def test_damaged_bytes_never_break_the_server_nor_a_neighbour(server: LiveServer) -> None:
    rng = random.Random(3)
    text = "neighbour 漢 keeps its text"
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        neighbour = pool.submit(server.events, "/v1/completions", prompt="<|slow|>" + text, max_tokens=60)
        for _ in range(400):
            path = rng.choice(sorted(ROUTES))
            body = bytearray(json.dumps(ROUTES[path], ensure_ascii=False).encode())
            for _ in range(rng.randint(1, 4)):
                body[rng.randrange(len(body))] = rng.randrange(256)
            response = server.http.post(path, content=bytes(body))
            assert response.status_code in {200, 400, 404}, (response.text, bytes(body))
        assert "".join(event["choices"][0]["text"] for event in neighbour.result()) == text
    server.assert_alive()
