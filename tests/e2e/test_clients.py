"""Sessions of the packages people use, each against the real model over HTTP as its users do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import jsonschema
import openai
import pytest

from tests.support.served import Served, served

pytestmark = [pytest.mark.e2e, pytest.mark.native]

ASK: list[Any] = [{"role": "user", "content": "Name the capital of France."}]
UNIT: dict[str, Any] = {"type": "object", "properties": {"unit": {"enum": ["c", "f"]}}, "required": ["unit"], "additionalProperties": False}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "set_unit", "description": "Set the unit", "parameters": UNIT}}


@pytest.fixture(scope="module")
def server(smollm2_calbin: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(smollm2_calbin, tmp_path_factory.mktemp("served") / "log") as running:
        yield running


def test_openai_session(server: Served) -> None:
    client = server.openai
    model = client.models.list().data[0].id
    assert client.models.retrieve(model).id == model
    fields: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(messages=ASK, logprobs=True, top_logprobs=2, seed=1, user="me", metadata={"a": "b"}, **fields)
    assert whole.usage is not None
    assert "Paris" in (whole.choices[0].message.content or "")
    with client.chat.completions.stream(messages=ASK, stream_options={"include_usage": True}, **fields) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert (final.choices[0].message.content, final.usage) == (whole.choices[0].message.content, whole.usage)
    developer: list[Any] = [{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}, *ASK]
    assert client.chat.completions.create(messages=developer, n=2, **fields).choices[1].index == 1
    legacy = client.completions.create(prompt="The capital of France is", echo=True, logprobs=2, **fields)
    assert legacy.choices[0].logprobs is not None
    assert legacy.choices[0].text.startswith("The capital of France is")
    assert "".join(legacy.choices[0].logprobs.tokens or []).endswith(legacy.choices[0].text)
    raw = client.chat.completions.with_raw_response.create(messages=ASK, **fields)
    assert raw.headers["x-request-id"]


def test_openai_tools_and_formats(server: Served) -> None:
    client = server.openai
    fields: dict[str, Any] = {"model": server.openai.models.list().data[0].id, "temperature": 0, "max_tokens": 60, "messages": ASK}
    answer = client.chat.completions.create(tools=[TOOL], tool_choice="required", **fields).choices[0]
    assert answer.finish_reason == "tool_calls"
    (call,) = answer.message.tool_calls or []
    jsonschema.validate(json.loads(call.function.arguments), UNIT)
    history = [*ASK, answer.message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    assert client.chat.completions.create(tools=[TOOL], **fields | {"messages": history}).choices[0].message.role == "assistant"
    form: Any = {"type": "json_schema", "json_schema": {"name": "unit", "schema": UNIT, "strict": True}}
    jsonschema.validate(json.loads(client.chat.completions.create(response_format=form, **fields).choices[0].message.content), UNIT)
    response = client.responses.create(model=fields["model"], input="Say hi.", max_output_tokens=16, temperature=0)
    assert response.output_text
    events = list(client.responses.create(model=fields["model"], input="Say hi.", max_output_tokens=16, temperature=0, stream=True))
    assert events[-1].response.output_text == response.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_openai_errors(server: Served) -> None:
    client = server.openai
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-9", messages=ASK)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="", messages=ASK, temperature=-1)
    assert caught.value.param == "temperature"


def test_anthropic_session(server: Served) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60)
    model = server.openai.models.list().data[0].id
    fields: dict[str, Any] = {"model": model, "max_tokens": 24, "messages": ASK, "extra_body": {"temperature": 0}}
    whole = client.messages.create(system="Be brief.", **fields)
    assert whole.content[0].text
    assert client.messages.count_tokens(model=model, messages=ASK, system="Be brief.").input_tokens == whole.usage.input_tokens
    with client.messages.stream(system="Be brief.", **fields) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        assert stream.get_final_message().usage.output_tokens == whole.usage.output_tokens
    tool: Any = {"name": "set_unit", "input_schema": UNIT}
    called = client.messages.create(tools=[tool], tool_choice={"type": "any"}, **fields | {"max_tokens": 80})
    assert called.stop_reason == "tool_use"
    use = called.content[-1]
    jsonschema.validate(use.input, UNIT)
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "done"}]}
    history = [*ASK, {"role": "assistant", "content": [block.model_dump() for block in called.content]}, result]
    assert client.messages.create(tools=[tool], **fields | {"messages": history}).type == "message"
    client.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_litellm_session(server: Served) -> None:
    litellm = pytest.importorskip("litellm")
    fields: dict[str, Any] = {"api_base": f"{server.url}/v1", "api_key": "none", "temperature": 0, "max_tokens": 24}
    model = f"openai/{server.openai.models.list().data[0].id}"
    whole = litellm.completion(model=model, messages=ASK, logprobs=True, top_logprobs=1, **fields)
    assert "Paris" in whole.choices[0].message.content
    assert whole.choices[0].logprobs["content"] if isinstance(whole.choices[0].logprobs, dict) else whole.choices[0].logprobs.content
    chunks = list(litellm.completion(model=model, messages=ASK, stream=True, stream_options={"include_usage": True}, **fields))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    rebuilt = litellm.stream_chunk_builder(chunks, messages=ASK)
    assert rebuilt.usage.completion_tokens == whole.usage.completion_tokens
    called = litellm.completion(model=model, messages=ASK, tools=[TOOL], tool_choice="required", **fields | {"max_tokens": 60})
    jsonschema.validate(json.loads(called.choices[0].message.tool_calls[0].function.arguments), UNIT)
    text = litellm.text_completion(model=f"text-completion-{model}", prompt="The capital of France is", logprobs=1, **fields)
    assert text.choices[0].text
    with pytest.raises(litellm.exceptions.BadRequestError):
        litellm.completion(model=model, messages=ASK, **fields | {"temperature": -1})
    messages = litellm.completion(
        model=f"anthropic/{model.removeprefix('openai/')}", messages=ASK, api_base=server.url, api_key="none", max_tokens=24, temperature=0
    )
    assert messages.choices[0].message.content == whole.choices[0].message.content


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_langchain_session(server: Served) -> None:
    langchain = pytest.importorskip("langchain_openai")
    model = server.openai.models.list().data[0].id
    fields: dict[str, Any] = {"base_url": f"{server.url}/v1", "api_key": "none", "model": model, "temperature": 0, "max_retries": 0}
    chat = langchain.ChatOpenAI(max_tokens=24, stream_usage=True, **fields)
    whole = chat.invoke(ASK)
    assert "Paris" in whole.content
    pieces = list(chat.stream(ASK))
    assert "".join(piece.content for piece in pieces) == whole.content
    usages = [piece.usage_metadata for piece in pieces if piece.usage_metadata]
    assert usages[-1]["output_tokens"] == whole.usage_metadata["output_tokens"]
    bound = langchain.ChatOpenAI(max_tokens=60, **fields).bind_tools([TOOL], tool_choice="set_unit")
    (call,) = bound.invoke(ASK).tool_calls
    jsonschema.validate(call["args"], UNIT)
    schema = {"title": "unit", "description": "a unit", **UNIT}
    found = langchain.ChatOpenAI(max_tokens=60, **fields).with_structured_output(schema, method="json_schema").invoke(ASK)
    jsonschema.validate(found, UNIT)
    assert len(langchain.ChatOpenAI(max_tokens=8, **fields).batch([ASK, ASK, ASK])) == 3
    assert langchain.OpenAI(max_tokens=8, **fields).invoke("The capital of France is")
    response = langchain.ChatOpenAI(max_tokens=24, use_responses_api=True, **fields).invoke(ASK)
    assert response.text == whole.content


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_evaluation_harness_scores_and_generates(server: Served) -> None:
    models = pytest.importorskip("lm_eval.models.openai_completions")
    instance = pytest.importorskip("lm_eval.api.instance").Instance
    adapter = models.LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions", model=server.openai.models.list().data[0].id, num_concurrent=1, max_retries=1, seed=1
    )
    pairs = [("The capital of France is", " Paris"), ("The capital of France is", " banana"), ("One two three four", " five")]
    found = adapter.loglikelihood([instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)])
    (paris, greedy), (banana, banana_is_greedy), (five, _) = found
    assert 0 > paris > banana
    assert greedy
    assert not banana_is_greedy
    assert five > banana
    (rolling,) = adapter.loglikelihood_rolling([instance("loglikelihood_rolling", {}, ("The sky is blue.",), 0)])
    assert rolling < 0
    until = {"until": ["."], "max_gen_toks": 16, "temperature": 0}
    (said,) = adapter.generate_until([instance("generate_until", {}, ("The capital of France is", until), 0)])
    assert "Paris" in said
    assert "." not in said
