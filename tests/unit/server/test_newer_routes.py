"""/v1/responses and /v1/messages through the official packages and raw: streams say what the whole answers say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.support.live_server import LiveServer, live_server
from tests.unit.server.test_thinking import THINKING
from tests.unit.server.test_tools import CITY, GET, said

CALL = "Let me see.\n" + said("get_weather", {"city": '東京 "q"'})
RESPONSE_TOOL: dict[str, Any] = {"type": "function", "strict": False, **GET["function"]}
MESSAGE_TOOL = {"name": "get_weather", "description": "Weather", "input_schema": CITY}
THOUGHT = "<think>\nhm\n</think>\n\nfine"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("newer"), template=THINKING, context=4096) as running:
        yield running


@pytest.fixture(scope="module")
def claude(server: LiveServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=30)


def events(server: LiveServer, path: str, **body: Any) -> list[dict[str, Any]]:
    response = server.http.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    out = []
    for block in response.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        out.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {out[-1]['type']}"
    return out


# --- responses -------------------------------------------------------------------------------------------------------------------


def response_bodies() -> list[dict[str, Any]]:
    return [
        {"input": "hello"},
        {"input": [{"role": "developer", "content": "x"}, {"role": "user", "content": [{"type": "input_text", "text": "hello"}]}]},
        {"input": THOUGHT, "instructions": "be brief"},
        {"input": CALL, "tools": [RESPONSE_TOOL]},
        {"input": "hello there world", "max_output_tokens": 3},
    ]


@pytest.mark.parametrize("body", response_bodies(), ids=["text", "items", "thought", "call", "cut"])
def test_response_stream_ends_with_the_whole_response(server: LiveServer, body: dict[str, Any]) -> None:
    whole = server.post("/v1/responses", **body)
    assert whole.status_code == 200, whole.text
    stream = events(server, "/v1/responses", **body)
    assert [event["sequence_number"] for event in stream] == list(range(len(stream)))
    assert [event["type"] for event in stream[:2]] == ["response.created", "response.in_progress"]
    last = stream[-1]["response"]

    def comparable(value: dict[str, Any]) -> Any:
        kept = {key: value[key] for key in ("status", "incomplete_details", "usage", "model")}
        return kept, [{k: v for k, v in item.items() if k not in {"id", "call_id"}} for item in value["output"]]

    assert comparable(last) == comparable(whole.json())
    for number, item in enumerate(last["output"]):
        added, done = (
            next(e for e in stream if e["type"] == f"response.output_item.{w}" and e["output_index"] == number) for w in ("added", "done")
        )
        assert added["item"]["id"] == item["id"]
        assert done["item"] == item
        deltas = "".join(e["delta"] for e in stream if e["type"].endswith(".delta") and e["item_id"] == item["id"])
        assert deltas == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])


def test_openai_package_gets_responses(server: LiveServer) -> None:
    answer = server.openai.responses.create(model="tiny", input="hello 漢")
    assert answer.output_text == "hello 漢"
    assert answer.id.startswith("resp_")
    assert answer.usage is not None
    assert answer.usage.output_tokens_details.reasoning_tokens == 0
    with server.openai.responses.stream(model="tiny", input="hello 漢") as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text == stream.get_final_response().output_text == "hello 漢"


def test_history_with_a_call_and_its_output_is_taken(server: LiveServer) -> None:
    items = [
        {"role": "user", "content": "weather?"},
        {"type": "reasoning", "summary": [], "content": []},
        {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": '{"city": "A"}'},
        {"type": "function_call_output", "call_id": "c", "output": "sunny"},
        {"type": "message", "role": "user", "content": "thanks"},
    ]
    answer = server.post("/v1/responses", input=items, tools=[RESPONSE_TOOL]).json()
    assert answer["output"][0]["content"][0]["text"] == "thanks"


def test_schema_of_a_response_is_kept(server: LiveServer) -> None:
    form = {"type": "json_schema", "name": "x", "schema": {"enum": ["a", "b"]}}
    text = server.post("/v1/responses", input="x", seed=1, text={"format": form}).json()["output"][0]["content"][0]["text"]
    assert json.loads(text) in {"a", "b"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "x", "background": True}, "background"),
        ({"input": [{"type": "item_reference", "id": "1"}]}, "input[0].type"),
        ({"input": []}, "messages"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "messages[0].content[0].type"),
        ({"input": 5}, "input"),
    ],
)
def test_odd_response_request_is_a_400(server: LiveServer, body: dict[str, Any], param: str) -> None:
    answer = server.post("/v1/responses", **body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


# --- messages --------------------------------------------------------------------------------------------------------------------


def message(text: str, **more: Any) -> dict[str, Any]:
    return {"max_tokens": 300, "messages": [{"role": "user", "content": text}], **more}


@pytest.mark.parametrize(
    ("body", "reason", "kinds"),
    [
        (message("hello 漢"), "end_turn", ["text"]),
        (message("hello", system=[{"type": "text", "text": "x"}], metadata={"user_id": "u"}), "end_turn", ["text"]),
        (message(THOUGHT, thinking={"type": "enabled", "budget_tokens": 1024}), "end_turn", ["thinking", "text"]),
        (message(CALL, tools=[MESSAGE_TOOL]), "tool_use", ["text", "tool_use"]),
        (message("a b c d", stop_sequences=["c"]), "stop_sequence", ["text"]),
        (message("hello world", max_tokens=2), "max_tokens", ["text"]),
    ],
    ids=["text", "system", "thought", "call", "stop", "cut"],
)
def test_message_stream_says_what_the_whole_message_says(server: LiveServer, body: dict[str, Any], reason: str, kinds: list[str]) -> None:
    whole = server.post("/v1/messages", **body).json()
    assert whole["type"] == "message", whole
    assert (whole["stop_reason"], [block["type"] for block in whole["content"]]) == (reason, kinds)
    stream = events(server, "/v1/messages", **body)
    start = stream[0]["message"]
    blocks: list[dict[str, Any]] = []
    assert start["content"] == []
    assert start["usage"]["input_tokens"] > 0
    for event in stream[1:]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            key = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "json", "signature_delta": "signature"}
            name = key[event["delta"]["type"]]
            value = event["delta"]["partial_json" if name == "json" else name]
            blocks[event["index"]][name] = blocks[event["index"]].get(name, "") + value
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block.pop("json"))
    strip = lambda found: [{k: v for k, v in block.items() if k != "id"} for block in found]  # noqa: E731
    assert strip(blocks) == strip(whole["content"])
    assert stream[-2]["delta"] == {"stop_reason": reason, "stop_sequence": whole["stop_sequence"]}
    assert stream[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert stream[-1] == {"type": "message_stop"}


def test_anthropic_package_completes_a_session(claude: anthropic.Anthropic) -> None:
    first = claude.messages.create(model="tiny", max_tokens=300, messages=[{"role": "user", "content": CALL}], tools=[MESSAGE_TOOL])  # type: ignore[list-item]
    call = first.content[-1]
    assert call.type == "tool_use"
    assert call.input == {"city": '東京 "q"'}
    history: list[Any] = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": [block.model_dump() for block in first.content]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}]},
        {"role": "user", "content": "thanks"},
    ]
    with claude.messages.stream(model="tiny", max_tokens=50, messages=history) as stream:
        assert "".join(stream.text_stream) == "thanks"
        assert stream.get_final_message().stop_reason == "end_turn"
    assert claude.messages.count_tokens(model="tiny", messages=history).input_tokens > 10


def test_forced_tool_is_called(claude: anthropic.Anthropic) -> None:
    answer = claude.messages.create(
        model="tiny", max_tokens=300, messages=[{"role": "user", "content": "no"}], tool_choice={"type": "tool", "name": "pick"},
        tools=[{"name": "pick", "input_schema": {"type": "object", "properties": {"u": {"enum": ["c"]}}, "required": ["u"]}}],
    )  # fmt: skip
    # a thought may come first: the call is what is forced
    assert [block.type for block in answer.content if block.type != "thinking"] == ["tool_use"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"messages": 5}, 400),
        ({}, 400),
        ({"messages": []}, 400),
        (message("x", model="other"), 404),
        (message("x", tool_choice={"type": "tool", "name": "f"}), 400),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400),
    ],
)
def test_errors_have_anthropics_shape(server: LiveServer, body: dict[str, Any], status: int) -> None:
    answer = server.post("/v1/messages", **body)
    assert answer.status_code == status, answer.text
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == {400: "invalid_request_error", 404: "not_found_error"}[status]


def test_official_clients_see_their_own_error_classes(server: LiveServer, claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="other", max_tokens=1, messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError):
        server.openai.responses.create(model="tiny", input="x", previous_response_id="resp_1")
