"""Chat messages as a template takes them."""

from __future__ import annotations

from typing import Any

import msgspec

from calstack.errors import RequestError
from calstack.server.schemas import ChatMessage, ChatRequest, ContentPart
from calstack.text.template import ChatInput

__all__ = ["chat_input"]

_ROLES = frozenset(["system", "developer", "user", "assistant", "tool", "function"])
_JOINT = "\n\n"  # between text parts, as llama-server joins them for templates that take strings


def chat_input(chat: ChatRequest) -> ChatInput:
    """The messages as a template takes them. A trailing assistant message is continued, as llama-server does.

    Raises:
        RequestError: with the path of the message that is wrong.
    """
    if not chat.messages:
        raise RequestError("must not be empty", where="$.messages", param="messages")
    messages = [_message(message, f"messages[{place}]") for place, message in enumerate(chat.messages)]
    last_is_ours = messages[-1]["role"] == "assistant"
    if chat.continue_final_message and chat.add_generation_prompt:
        raise _bad("continue_final_message", "cannot go with add_generation_prompt")
    if chat.continue_final_message and not last_is_ours:
        raise _bad("continue_final_message", "needs an assistant message at the end")
    if last_is_ours and len(messages) > 1 and messages[-2]["role"] == "assistant":
        raise _bad(f"messages[{len(messages) - 1}]", "two assistant messages at the end cannot be continued")
    continued = last_is_ours and bool(messages[-1]["content"]) and chat.add_generation_prompt is not True
    if continued and messages[-1].get("tool_calls"):
        raise _bad(f"messages[{len(messages) - 1}]", "a message with tool calls cannot be continued")
    return ChatInput(
        messages=messages,
        tools=tuple(chat.tools or ()) if chat.tool_choice != "none" else (),
        variables=_variables(chat),
        continue_final=continued,
        generation_prompt=chat.add_generation_prompt is not False,
    )


def _variables(chat: ChatRequest) -> dict[str, Any]:
    variables = dict(chat.chat_template_kwargs or {})
    if chat.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", chat.reasoning_effort)
        if chat.reasoning_effort == "none":
            variables["enable_thinking"] = False
    for name in ("messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now"):
        if name in variables:
            raise _bad(f"chat_template_kwargs.{name}", "is set by the server")
    if not isinstance(variables.get("enable_thinking", True), bool):
        raise _bad("chat_template_kwargs.enable_thinking", "must be true or false")
    return variables


def _message(message: ChatMessage, path: str) -> dict[str, Any]:
    if message.role not in _ROLES:
        raise _bad(f"{path}.role", f"role must be one of {', '.join(sorted(_ROLES))}")
    content = message.content
    if content is msgspec.UNSET:
        if message.role != "assistant":
            raise _bad(f"{path}.content", "content is missing")
        content = None
    return {
        "role": message.role,
        "content": _text(content, path),
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content,
        "tool_calls": msgspec.to_builtins(message.tool_calls) if message.tool_calls else None,
    }


def _text(content: str | list[ContentPart] | None, path: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for place, part in enumerate(content):
        if part.type not in {"text", "input_text", "output_text", "refusal"}:
            raise _bad(f"{path}.content[{place}].type", f"content of type {part.type!r} is not supported, text is")
        if part.text is None:
            raise _bad(f"{path}.content[{place}].text", "text is missing")
        texts.append(part.text)
    return _JOINT.join(texts)


def _bad(param: str, what: str) -> RequestError:
    return RequestError(what, where=f"$.{param}", param=param)
