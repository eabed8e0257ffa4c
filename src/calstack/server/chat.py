"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from calstack.errors import NotInCalbin, RequestError
from calstack.server.choice import Delta, End
from calstack.server.constraints import constraint_of
from calstack.server.context import Context
from calstack.server.exchange import Plan
from calstack.server.generation import Generation
from calstack.server.params import Generate, check_supported, generate_of, top_logprobs_of
from calstack.server.render import Collected, Envelope, chat_logprobs, timings_of, usage_of
from calstack.server.schemas import ChatMessage, ChatRequest, ContentPart
from calstack.server.status import check_model
from calstack.text.pieces import PieceTable
from calstack.text.template import ChatInput

__all__ = ["ChatRenderer", "chat_input", "understand_chat"]

_ROLES = frozenset(["system", "developer", "user", "assistant", "tool", "function"])
_JOINT = "\n\n"  # between text parts, as llama-server joins them for templates that take strings


def understand_chat(context: Context, chat: ChatRequest, request_id: str) -> Plan:
    """Check a chat request."""
    model = context.model
    check_model(model, chat.model)
    check_supported(chat)
    generate = generate_of(chat, model.vocabulary, context.config.limits, model.defaults)
    top = _top_logprobs(chat, context)
    rendered, spec = chat_input(chat), constraint_of(chat)
    if (template := model.template) is None:
        raise NotInCalbin("this calbin has no chat template", remedy="use /v1/completions")
    return Plan(
        generate=generate,
        prompts=1,
        tokenise=lambda: [model.tokenizer.encode_prompt(template.render(rendered, model.tokenizer))],
        renderer=ChatRenderer(f"chatcmpl-{request_id}", model.id, model.fingerprint, generate, model.tokenizer.pieces),
        top_logprobs=top,
        constrain=None if spec is None else lambda: model.constraints.source(spec),
    )


def _top_logprobs(chat: ChatRequest, context: Context) -> int:
    if not chat.logprobs:
        if chat.top_logprobs is not None and chat.top_logprobs != 0:
            raise RequestError("needs logprobs", where="$.top_logprobs", param="top_logprobs")
        return -1
    return top_logprobs_of(chat.top_logprobs, context.config.limits, "top_logprobs")


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
        tools=chat.tools if chat.tools and chat.tool_choice != "none" else (),
        variables=_variables(chat),
        continue_final=continued,
        generation_prompt=chat.add_generation_prompt is not False,
    )


def _variables(chat: ChatRequest) -> dict[str, Any]:
    variables = dict(chat.chat_template_kwargs or {})
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


class ChatRenderer:
    """Writes chat answers."""

    def __init__(self, id_: str, model: str, fingerprint: str, generate: Generate, pieces: PieceTable) -> None:
        self._whole = Envelope(id_, "chat.completion", model, fingerprint)
        self._chunk = Envelope(id_, "chat.completion.chunk", model, fingerprint)
        self._generate, self._pieces = generate, pieces
        self._begun: set[int] = set()

    def whole(self, choices: Sequence[Collected], generation: Generation) -> dict[str, Any]:
        answer = self._whole.around([self._choice(choice) for choice in choices]) | {"usage": usage_of(generation)}
        if self._generate.timings and choices[0].end is not None:
            answer["timings"] = timings_of(choices[0].end)
        return answer

    def _choice(self, choice: Collected) -> dict[str, Any]:
        assert choice.end is not None
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": chat_logprobs(choice.tokens, self._pieces) if choice.tokens else None,
            "finish_reason": choice.end.reason,
        }

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        out = []
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            out.append(self._piece(delta.index, {"role": "assistant", "content": ""}))
        if delta.text or delta.tokens:
            piece = self._piece(delta.index, {"content": delta.text})
            if delta.tokens:
                piece["choices"][0]["logprobs"] = chat_logprobs(delta.tokens, self._pieces)
            out.append(piece)
        if delta.end is not None:
            out.append(self._last(delta.index, delta.end))
        return out

    def _last(self, index: int, end: End) -> dict[str, Any]:
        piece = self._piece(index, {}, end.reason)
        if self._generate.timings:
            piece["timings"] = timings_of(end)
        return piece

    def _piece(self, index: int, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        return self._chunk.around([{"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}])

    def tail(self, generation: Generation) -> list[dict[str, Any]]:
        return [self._chunk.around([]) | {"usage": usage_of(generation)}] if self._generate.include_usage else []
