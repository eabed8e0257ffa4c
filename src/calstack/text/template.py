"""Chat templates: messages to one prompt."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime as dt
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

import jinja2

from calstack.errors import ArtifactError, RequestError
from calstack.text.sandbox import ChatEnvironment, TemplateRaised
from calstack.text.tokenizer import PromptText, Tokenizer

__all__ = ["ChatInput", "ChatTemplate"]

Message = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChatInput:
    """What a template renders. Messages hold role, content as text, and the optional OpenAI fields."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    continue_final: bool = False
    """Leave the last message open, so that the answer goes on with it."""
    generation_prompt: bool = True


class ChatTemplate:
    """A compiled template.

    Args:
        source: the jinja2 text.
        special: variables such as bos_token and eos_token.
        seconds: longest time a rendering may take.

    Raises:
        ArtifactError: when the template does not parse.
    """

    def __init__(
        self,
        source: str,
        *,
        special: Mapping[str, str] | None = None,
        seconds: float = 2.0,
        now: Callable[[], dt.datetime] | None = None,
    ) -> None:
        self.source = source
        self._special = dict(special or {})
        self._seconds, self._now = seconds, now
        try:
            self._code: CodeType = ChatEnvironment(seconds).compile(source)
        except jinja2.TemplateError as error:
            raise ArtifactError(f"is not a template: {error}", where="chat_template.jinja", remedy="compile the model again") from error

    def render(self, chat: ChatInput, tokenizer: Tokenizer) -> PromptText:
        """The prompt, special tokens of users guarded.

        Raises:
            RequestError: when the template refuses the messages; with the template's own words.
        """
        messages = [_normal(message) for message in chat.messages]
        tools = copy.deepcopy(list(chat.tools))
        variables = dict(chat.variables)
        guard = tokenizer.guard_for(list(_texts([messages, tools, variables])))
        if guard:
            messages, tools, variables = _map_texts([messages, tools, variables], lambda text: tokenizer.guarded(text, guard))
        text = self._render(messages, tools, variables, generation=chat.generation_prompt and not chat.continue_final)
        if chat.continue_final:
            text = _open_end(text, messages[-1]["content"])
        return PromptText(text, guard)

    def _render(self, messages: list[Message], tools: list[Any], variables: dict[str, Any], *, generation: bool) -> str:
        environment = ChatEnvironment(self._seconds, self._now)
        template = jinja2.Template.from_code(environment, self._code, environment.make_globals(None))
        names = {
            **self._special,
            **variables,
            "messages": messages,
            "tools": tools or None,
            "add_generation_prompt": generation,
        }
        try:
            return environment.bounded_output(template.generate(**names))
        except TemplateRaised:
            raise
        except jinja2.TemplateError as error:
            raise TemplateRaised(f"the chat template refuses the messages: {error}", param="messages") from error
        except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
            raise TemplateRaised(f"the chat template cannot render the messages: {error}", param="messages") from error


def _normal(message: Message) -> Message:
    """The message as templates expect it: developer is system, no null content, tool arguments as values."""
    out = {key: value for key, value in message.items() if value is not None}
    if out["role"] == "developer":
        out["role"] = "system"
    out.setdefault("content", "")
    if out.get("tool_calls"):
        out["tool_calls"] = [_normal_call(call) for call in out["tool_calls"]]
    else:
        out.pop("tool_calls", None)
    return out


def _normal_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        with contextlib.suppress(ValueError, RecursionError):  # not JSON: the template gets the text
            function["arguments"] = json.loads(function["arguments"] or "{}")
    return {**call, "function": function}


def _open_end(text: str, content: str) -> str:
    """Cut after the last occurrence of the final message's content, as transformers' continue_final_message does."""
    wanted = content.rstrip()
    at = text.rfind(wanted) if wanted else -1
    if at < 0:
        raise RequestError("the chat template does not show the last message, so it cannot be continued", param="continue_final_message")
    tail = content if text.startswith(content, at) else wanted
    return text[: at + len(tail)]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_texts(key, change): _map_texts(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_texts(item, change) for item in value]
    return value
