from __future__ import annotations

import datetime as dt
import time
from typing import Any

import pytest

from calstack.errors import ArtifactError, RequestError
from calstack.text.template import ChatInput, ChatTemplate
from calstack.text.tokenizer import Tokenizer
from tests.support.tiny_model import TEMPLATE, tokenizer_json

TOKENIZER = Tokenizer(tokenizer_json())
USER = {"role": "user", "content": "x"}


def render(source: str, *messages: dict[str, Any], seconds: float = 0.5, **more: Any) -> str:
    return ChatTemplate(source, seconds=seconds).render(ChatInput(messages=messages or (USER,), **more), TOKENIZER).text


def test_developer_is_rendered_as_system() -> None:
    system = render(TEMPLATE, {"role": "system", "content": "be brief"}, USER)
    assert render(TEMPLATE, {"role": "developer", "content": "be brief"}, USER) == system
    assert "be brief" in system


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}])
def test_missing_content_is_no_text(content: dict[str, Any]) -> None:
    assert "<|im_start|>assistant<|say|><|im_end|>" in render(TEMPLATE, {"role": "assistant", "tool_calls": [], **content}, USER)


def test_continued_message_stays_open() -> None:
    text = render(TEMPLATE, USER, {"role": "assistant", "content": "Once upon "}, continue_final=True)
    assert text.endswith("<|im_start|>assistant<|say|>Once upon ")


def test_raise_exception_is_a_request_error_with_the_template_s_words() -> None:
    with pytest.raises(RequestError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ j }}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(90) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(90) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{{ 'a' * 10 ** 10 }}",
        "{{ 10 ** 10 ** 10 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ messages[0].content.ljust(10 ** 9) }}",
        "{% for m in range(90000) %}{{ 'x' * 1000 }}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_runaway_template_is_stopped(source: str) -> None:
    began = time.monotonic()
    with pytest.raises(RequestError, match="template"):
        render(source)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("source", ["{{ ''.__class__ }}", "{{ messages.append(1) }}", "{{ missing.field }}", "{{ cycler.__init__ }}"])
def test_unsafe_or_undefined_access_is_a_request_error(source: str) -> None:
    with pytest.raises(RequestError, match="template"):
        render(source + "{{ (''.__class__).x }}")


def test_tojson_keeps_text_as_transformers_does() -> None:
    assert render("{{ messages[0] | tojson }}", {"role": "user", "content": "é<>&'"}) == '{"role": "user", "content": "é<>&\'"}'


def test_strftime_now_gives_the_time() -> None:
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", now=lambda: dt.datetime(2026, 11, 30, tzinfo=dt.UTC))
    assert template.render(ChatInput(messages=[USER]), TOKENIZER).text == "2026-11-30"


def test_tool_arguments_come_as_values() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"city": "Zürich"}'}}
    text = render("{{ messages[0].tool_calls[0].function.arguments.city }}", {"role": "assistant", "content": None, "tool_calls": [call]})
    assert text == "Zürich"


def test_generation_tags_are_transparent() -> None:
    assert render("a{% generation %}b{% endgeneration %}c") == "abc"


def test_template_that_does_not_parse_is_an_artifact_error() -> None:
    with pytest.raises(ArtifactError, match="chat_template"):
        ChatTemplate("{% for %}")
