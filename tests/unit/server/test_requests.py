"""Trials C and D: fields out of range, odd bodies, messages and templates. After each of them the server is alive."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.live_server import LiveServer, live_server
from tests.support.tiny_model import STRICT_TEMPLATE


def content(response: Any) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {"999999999": 5}),
        ("logit_bias", {"-1": 5}),
        ("logit_bias", {"332": 5}),
        ("logit_bias", {"5": True}),
        ("logit_bias", [[5, "x"]]),
        ("temperature", -1),
        ("temperature", "0.5"),
        ("temperature", 1e10),
        ("top_p", 1.5),
        ("top_k", -2),
        ("min_p", -0.1),
        ("n", 0),
        ("n", -1),
        ("n", 1000),
        ("n", 1.5),
        ("best_of", 3),
        ("stop_token_ids", [None]),
        ("stop_token_ids", [10**9]),
        ("seed", 2**65),
        ("seed", "x"),
        ("max_tokens", -2),
        ("max_tokens", 2**63),
        ("min_tokens", -1),
        ("min_tokens", "3"),
        ("stop", ["a"] * 65),
        ("stop", "a" * 2000),
        ("stop", [1]),
        ("stream_options", {"include_usage": True}),
        ("frequency_penalty", 1e9),
        ("repetition_penalty", 0),
        ("messages", None),
        ("messages", []),
        ("messages", "x"),
        ("messages", [123]),
        ("messages", [{}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "nonsense"}),
        ("response_format", "json"),
    ],
)
def test_field_out_of_range_is_a_400_that_names_it(server: LiveServer, field: str, value: Any) -> None:
    response = server.chat("x", **{field: value}) if field != "messages" else server.post("/v1/chat/completions", messages=value)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["code"] == 400
    assert (error["param"] or "").split("[")[0].split(".")[0] == field
    server.assert_alive()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mirostat", 2),
        ("dry_multiplier", 0.8),
        ("functions", [{}]),
        ("lora", [{"id": 0}]),
    ],
)
def test_field_of_a_feature_that_is_not_built_is_a_501_and_never_dropped(server: LiveServer, field: str, value: Any) -> None:
    response = server.chat("x", **{field: value})
    assert response.status_code == 501
    assert field in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        {
            "response_format": {"type": "text"},
            "tools": [],
            "tool_choice": "none",
            "parallel_tool_calls": True,
            "user": "u",
            "metadata": {"a": "b"},
        },
        {
            "repetition_penalty": 1.0,
            "logprobs": None,
            "ignore_eos": None,
            "stop": None,
            "mirostat": 0,
            "min_tokens": 0,
            "unknown": {"x": [1]},
        },
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"temperature": 1e-10},
        {"temperature": 1e-38},
        {"temperature": 0},
        {"temperature": 1e9},
        {"seed": -1},
        {"seed": 2**64 - 1},
        {"top_k": -1},
        {"logit_bias": {"5": -100, "hello": False}},
        {"logit_bias": [[5, 1], ["x", False]]},
        {"model": "tiny"},
        {"model": ""},
        {"model": None},
    ],
)
def test_harmless_and_unknown_fields_are_accepted(server: LiveServer, body: dict[str, Any]) -> None:
    assert content(server.chat("fine", **body)) == "fine"


def test_unknown_model_is_a_404(server: LiveServer) -> None:
    response = server.chat("x", model="gpt-9")
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "not_found_error"
    assert response.json()["error"]["param"] == "model"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", {"messages": [{"role": "user", "content": "z" * 600}]}), ("/v1/completions", {"prompt": "z" * 600})],
)
def test_prompt_beyond_the_context_is_a_400_with_numbers_in_both_modes(server: LiveServer, path: str, body: dict, stream: bool) -> None:
    response = server.post(path, **body, stream=stream)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "exceed_context_size_error"
    assert error["n_prompt_tokens"] >= 600
    assert error["n_ctx"] == 512


def test_generation_ends_with_length_when_the_context_is_full(server: LiveServer) -> None:
    answer = server.complete("<|long|>" + "z" * 500, max_tokens=10_000).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 512


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": ' + b"[" * 3000 + b"]" * 3000 + b"}",
        b'{"messages": [{"role": "user", "content": "x"}], "unknown": ' + b'{"a":' * 3000 + b"1" + b"}" * 3000 + b"}",
        b'{"messages": [{"role": "user", "content": "x"}], "tools": ' + b"[" * 70 + b"]" * 70 + b"}",
        b"{",
        b"",
        b"[]",
        b"null",
        b"5",
        b'"x"',
        b"\xff\xfe",
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"messages": 1e999}',
        b'{"temperature": NaN, "messages": [{"role": "user", "content": "x"}]}',
    ],
)
def test_damaged_or_deep_body_is_a_400(server: LiveServer, body: bytes) -> None:
    response = server.http.post("/v1/chat/completions", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    server.assert_alive()


def test_brackets_inside_strings_are_not_nesting(server: LiveServer) -> None:
    text = '[{"\\' * 50
    assert content(server.chat(text)) == text


def test_body_beyond_the_limit_is_a_413(server: LiveServer) -> None:
    big = b'{"content": "' + b"x" * (9 << 20) + b'"}'
    assert server.http.post("/tokenize", content=big).status_code == 413

    def chunks() -> Any:
        for start in range(0, len(big), 1 << 20):
            yield big[start : start + (1 << 20)]

    assert server.http.post("/tokenize", content=chunks()).status_code == 413
    server.assert_alive()


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": ""}],
        [{"role": "system", "content": "only system"}],
        [{"role": "assistant", "content": "only assistant"}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": None}],
    ],
)
def test_odd_but_legal_messages_are_answered(server: LiveServer, messages: list[dict[str, Any]]) -> None:
    content(server.post("/v1/chat/completions", messages=messages))
    server.assert_alive()


@pytest.mark.parametrize(
    "history", [{"content": None}, {"content": ""}, {"content": []}, {"tool_calls": []}, {"content": None, "tool_calls": []}]
)
def test_assistant_history_without_text_is_accepted(server: LiveServer, history: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", **history}, {"role": "user", "content": "b"}]
    assert content(server.post("/v1/chat/completions", messages=messages)) == "b"


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_text_parts_are_joined_in_every_role(server: LiveServer, role: str) -> None:
    parts = [{"type": "text", "text": "Wh"}, {"type": "text", "text": "ill"}]
    messages = [{"role": role, "content": parts, "tool_call_id": None}, {"role": "user", "content": parts}]
    assert content(server.post("/v1/chat/completions", messages=messages)) == "Wh\n\nill"


@pytest.mark.parametrize(
    "part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "nonsense"}, {"type": "text"}, {"text": "x"}, 5]
)
def test_part_that_is_not_text_is_a_400(server: LiveServer, part: Any) -> None:
    response = server.chat([part])
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("messages[0].content" if not isinstance(part, int) else "messages")


@pytest.mark.parametrize("message", [{"role": "robot", "content": "x"}, {"content": "x"}, {"role": "user"}, {"role": 5, "content": "x"}])
def test_message_without_a_known_role_or_content_is_a_400(server: LiveServer, message: dict[str, Any]) -> None:
    response = server.post("/v1/chat/completions", messages=[message])
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("messages[0]")


def test_developer_gives_the_same_prompt_as_system(server: LiveServer) -> None:
    usage = [
        server.post("/v1/chat/completions", messages=[{"role": role, "content": "s"}, {"role": "user", "content": "u"}]).json()["usage"]
        for role in ("system", "developer")
    ]
    assert usage[0] == usage[1]


def test_template_that_refuses_gives_its_words_as_a_400(server: LiveServer) -> None:
    response = server.post("/v1/chat/completions", messages=[{"role": "tool", "content": ""}])
    assert response.status_code == 400
    assert "a tool message needs content" in response.json()["error"]["message"]
    server.assert_alive()


def test_strict_template_refuses_order_in_both_modes(tmp_path: Any) -> None:
    with live_server(tmp_path, template=STRICT_TEMPLATE) as strict:
        for messages in ([("user", "a"), ("user", "b")], [("assistant", "a"), ("user", "b")]):
            for stream in (False, True):
                sent = [{"role": role, "content": text} for role, text in messages]
                response = strict.post("/v1/chat/completions", messages=sent, stream=stream)
                assert response.status_code == 400
                assert "must alternate" in response.json()["error"]["message"]
        strict.assert_alive()


def test_calbin_without_template_answers_chat_with_501(tmp_path: Any) -> None:
    with live_server(tmp_path, template=None) as plain:
        assert plain.chat("x").status_code == 501
        assert plain.complete("fine").json()["choices"][0]["text"] == "fine"


def test_defaults_come_from_the_calbin_and_ends_add_up(tmp_path: Any) -> None:
    generation = {"temperature": 0.25, "top_k": 7, "eos_token_id": [1, 65], "do_sample": True, "unknown": 1}
    with live_server(tmp_path, generation=generation) as other:
        model = other.context.model
        assert (model.defaults.temperature, model.defaults.top_k, model.defaults.top_p) == (0.25, 7, 1.0)
        assert model.vocabulary.end_ids == (1, 65)


@pytest.mark.parametrize("echo", [True, False])
def test_echo_gives_the_prompt_back(server: LiveServer, echo: bool) -> None:
    assert server.complete("hi", echo=echo).json()["choices"][0]["text"] == ("hihi" if echo else "hi")
    events = server.events("/v1/completions", prompt="hi", echo=echo)
    assert "".join(event["choices"][0]["text"] for event in events) == ("hihi" if echo else "hi")


def test_echo_with_no_tokens_gives_the_prompt_alone(server: LiveServer) -> None:
    answer = server.complete("hi", echo=True, max_tokens=0).json()
    assert answer["choices"][0]["text"] == "hi"
    assert answer["usage"]["completion_tokens"] == 0
    server.assert_alive()


def test_prompt_forms_are_the_same_prompt(server: LiveServer) -> None:
    ids = server.post("/tokenize", content="the fox").json()["tokens"]
    for prompt in ("the fox", ids, [*ids[:1], server.post("/detokenize", tokens=ids[1:]).json()["content"]]):
        assert [choice["text"] for choice in server.complete(prompt).json()["choices"]] == ["the fox"], prompt
    answer = server.complete([ids, ids[:1]]).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    answer = server.complete(["one", "two"], n=2).json()
    assert [choice["text"] for choice in answer["choices"]] == ["one", "one", "two", "two"]


@pytest.mark.parametrize("prompt", [[], [[]], [10**9], [-1], [1, [2]], True, None, {"a": 1}, ["x"] * 65])
def test_odd_prompt_is_a_400(server: LiveServer, prompt: Any) -> None:
    response = server.complete(prompt)
    assert response.status_code == 400
    server.assert_alive()


def test_completion_default_limit_is_sixteen(server: LiveServer) -> None:
    answer = server.post("/v1/completions", prompt="<|long|>x").json()
    assert answer["usage"]["completion_tokens"] == 16


def test_error_carries_the_union_of_fields(server: LiveServer) -> None:
    error = json.loads(server.chat("x", n=0).text)["error"]
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/nothing", 404), ("GET", "/v1/completions", 405), ("POST", "/health", 405)]
)
def test_unknown_route_or_method_has_the_same_error_shape(server: LiveServer, method: str, path: str, status: int) -> None:
    response = server.http.request(method, path)
    assert response.status_code == status
    assert response.json()["error"]["code"] == status
