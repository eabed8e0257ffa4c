"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's shapes over the chat route's work."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from calstack.errors import RequestError
from calstack.server.blocks import Block, BlockEvent, Blocks
from calstack.server.body import decode
from calstack.server.chat import ChatWork, chat_plan
from calstack.server.choice import Delta, End
from calstack.server.context import Context
from calstack.server.errors import Answer
from calstack.server.exchange import Plan
from calstack.server.generation import Generation
from calstack.server.inspect import ApplyTemplate
from calstack.server.render import Collected
from calstack.server.schemas import ChatRequest
from calstack.server.sse import named_event
from calstack.text.output import OutputParser

__all__ = ["CountMessages", "MessagesRequest", "anthropic_error", "understand_messages"]

_KINDS = {404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error", 401: "authentication_error", 503: "overloaded_error"}

_DELTAS = {"content": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking"), "call": ("input_json_delta", "partial_json")}


class _Turn(msgspec.Struct, kw_only=True, frozen=True):
    role: str
    content: str | list[dict[str, Any]]


class MessagesRequest(msgspec.Struct, kw_only=True, frozen=True):
    """Anthropic's request."""

    messages: list[_Turn]
    model: str | None = None
    max_tokens: int | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    thinking: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None


def chat_of(given: MessagesRequest) -> ChatRequest:
    """The same request for the chat route.

    Raises:
        RequestError: naming the field that is wrong.
    """
    messages = [{"role": "system", "content": _text(given.system, "system")}] if given.system else []
    for place, turn in enumerate(given.messages):
        messages += _messages(turn, f"messages[{place}]")
    chat: dict[str, Any] = {
        "messages": messages,
        "model": given.model,
        "max_tokens": 4096 if given.max_tokens is None else given.max_tokens,
        "stop": given.stop_sequences,
        "temperature": given.temperature,
        "top_p": given.top_p,
        "top_k": given.top_k,
        "stream": given.stream,
        "tools": [_tool(tool, f"tools[{place}]") for place, tool in enumerate(given.tools)] if given.tools else None,
        **_choice(given.tool_choice, bool(given.tools)),
        **_thinking(given.thinking),
    }
    try:
        return msgspec.convert(chat, ChatRequest)
    except msgspec.ValidationError as error:
        raise RequestError(str(error)) from error


def _choice(choice: dict[str, Any] | None, has_tools: bool) -> dict[str, Any]:
    if choice is None:
        return {}
    kinds: dict[Any, Any] = {"auto": "auto", "any": "required", "none": "none"}
    kind, single = choice.get("type"), choice.get("disable_parallel_tool_use") is True
    if kind == "tool":
        wanted: Any = {"type": "function", "function": {"name": choice.get("name")}}
    elif kind in kinds:
        wanted = kinds[kind]
    else:
        raise _bad("tool_choice.type", "must be auto, any, tool or none")
    return {"tool_choice": wanted} | ({"parallel_tool_calls": False} if single and has_tools else {})


def _thinking(thinking: dict[str, Any] | None) -> dict[str, Any]:
    if thinking is None:
        return {}
    if thinking.get("type") == "enabled":
        return {"thinking_budget_tokens": thinking.get("budget_tokens")}
    return {"reasoning_effort": "none"} if thinking.get("type") == "disabled" else {}


def _tool(tool: dict[str, Any], path: str) -> dict[str, Any]:
    if "name" not in tool or tool.get("type", "custom") != "custom":
        raise _bad(path, "a tool has a name and an input_schema")
    function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": tool.get("input_schema")}
    return {"type": "function", "function": function}


def _messages(turn: _Turn, path: str) -> list[dict[str, Any]]:
    if turn.role not in {"user", "assistant", "system"}:
        raise _bad(f"{path}.role", "role must be user or assistant")
    blocks = [{"type": "text", "text": turn.content}] if isinstance(turn.content, str) else turn.content
    out: list[dict[str, Any]] = []
    texts: list[str] = []
    message: dict[str, Any] = {"role": turn.role}
    for place, block in enumerate(blocks):
        where = f"{path}.content[{place}]"
        match block.get("type"):
            case "text":
                texts.append(_string(block, "text", where))
            case "thinking":
                message["reasoning_content"] = message.get("reasoning_content", "") + _string(block, "thinking", where)
            case "redacted_thinking":
                pass
            case "tool_use":
                call = {"name": _string(block, "name", where), "arguments": json.dumps(block.get("input") or {}, ensure_ascii=False)}
                message.setdefault("tool_calls", []).append({"id": block.get("id"), "type": "function", "function": call})
            case "tool_result":
                result = _text(block.get("content") or "", f"{where}.content")
                out.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
            case kind:
                raise _bad(f"{where}.type", f"{str(kind)[:40]} input is not supported")
    if texts or message.get("tool_calls") or not out:
        out.append({**message, "content": "\n\n".join(texts)})
    return out


def _text(value: Any, path: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(block, dict) for block in value):
        raise _bad(path, "must be a text or a list of blocks")
    for place, block in enumerate(value):
        if block.get("type") != "text":
            raise _bad(f"{path}[{place}].type", f"{str(block.get('type'))[:40]} input is not supported")
    return "\n\n".join(_string(block, "text", path) for block in value)


def _string(block: dict[str, Any], name: str, path: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise _bad(f"{path}.{name}", "must be a string")
    return value


def _bad(param: str, what: str) -> RequestError:
    return RequestError(what, where=f"$.{param}", param=param)


def understand_messages(context: Context, given: MessagesRequest, request_id: str) -> Plan:
    """Check a request."""
    work = ChatWork(context, chat_of(given))
    renderer = MessagesRenderer(f"msg_{request_id}", context.model.id, work)
    plan = chat_plan(work, renderer)
    return dataclasses.replace(plan, frame=named_event, done=b"", failed=anthropic_error)


def anthropic_error(answer: Answer) -> dict[str, Any]:
    """An error in Anthropic's shape."""
    kind = _KINDS.get(answer.status, "api_error" if answer.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": answer.body["error"]["message"]}}


class CountMessages(ApplyTemplate):
    """POST /v1/messages/count_tokens."""

    schema = MessagesRequest

    def _work(self, body: bytes) -> ChatWork:
        return ChatWork(self._context, chat_of(decode(body, MessagesRequest, max_depth=self._context.config.limits.max_json_depth)))

    def _answer(self, body: bytes) -> dict[str, Any]:
        return {"input_tokens": len(self._work(body).prompt_ids())}


class MessagesRenderer:
    """Writes messages."""

    def __init__(self, id_: str, model: str, work: ChatWork) -> None:
        self._id, self._model, self._work = id_, model, work
        self._blocks = Blocks()
        self._begun = False
        self._parser: OutputParser

    def _message(self, content: list[dict[str, Any]], end: End | None) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": _reason(end, self._blocks) if end else None,
            "stop_sequence": end.stop_string if end else None,
            "usage": self._usage(end),
        }

    def _usage(self, end: End | None) -> dict[str, int]:
        cached = end.usage.cached_tokens if end and end.usage else 0
        return {
            "input_tokens": self._work.prompt_tokens - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": end.completion_tokens if end else 0,
        }

    def whole(self, choices: Sequence[Collected], generation: Generation) -> dict[str, Any]:
        (choice,) = choices
        self._parser = self._work.parser()
        list(self._blocks.take([*self._parser.push(choice.text), *self._parser.flush()]))
        return self._message([self._whole_block(block) for block in self._blocks.all], choice.end)

    def _whole_block(self, block: Block) -> dict[str, Any]:
        if block.kind == "call":
            value: Any = {}
            with contextlib.suppress(ValueError):  # cut by the token limit
                value = json.loads(block.text)
            return {**self._opened(block), "input": value}
        return {**self._opened(block), "text" if block.kind == "content" else "thinking": block.text}

    def _opened(self, block: Block) -> dict[str, Any]:
        if block.kind == "call":
            return {"type": "tool_use", "id": f"toolu_{self._id.removeprefix('msg_')}_{block.number}", "name": block.name, "input": {}}
        return {"type": "text", "text": ""} if block.kind == "content" else {"type": "thinking", "thinking": "", "signature": ""}

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        out = []
        if not self._begun:
            self._begun = True
            self._parser = self._work.parser()
            out.append({"type": "message_start", "message": self._message([], None)})
        events = list(self._blocks.take(self._parser.push(delta.text) + (self._parser.flush() if delta.end else [])))
        if delta.end is not None:
            events += self._blocks.close()
        out += [written for event in events for written in self._event(event)]
        if delta.end is not None:
            ending = {"stop_reason": _reason(delta.end, self._blocks), "stop_sequence": delta.end.stop_string}
            out += [{"type": "message_delta", "delta": ending, "usage": self._usage(delta.end)}, {"type": "message_stop"}]
        return out

    def _event(self, event: BlockEvent) -> Iterator[dict[str, Any]]:
        block, index = event.block, {"index": event.block.number}
        if event.what == "open":
            yield {"type": "content_block_start", **index, "content_block": self._opened(block)}
        elif event.what == "grow":
            kind, key = _DELTAS[block.kind]
            yield {"type": "content_block_delta", **index, "delta": {"type": kind, key: event.text}}
        else:
            if block.kind == "reasoning":
                yield {"type": "content_block_delta", **index, "delta": {"type": "signature_delta", "signature": ""}}
            yield {"type": "content_block_stop", **index}

    def tail(self, generation: Generation) -> list[dict[str, Any]]:
        return []


def _reason(end: End, blocks: Blocks) -> str:
    if end.reason == "length":
        return "max_tokens"
    if end.stop_string is not None:
        return "stop_sequence"
    return "tool_use" if any(block.kind == "call" for block in blocks.all) else "end_turn"
