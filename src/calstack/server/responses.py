"""POST /v1/responses: OpenAI's newer shape over the chat route's work. Nothing is stored."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from calstack.errors import RequestError
from calstack.server.blocks import Block, BlockEvent, Blocks
from calstack.server.chat import ChatWork, chat_plan
from calstack.server.choice import Delta, End
from calstack.server.context import Context
from calstack.server.errors import Answer
from calstack.server.exchange import Plan
from calstack.server.generation import Generation
from calstack.server.render import Collected
from calstack.server.schemas import ChatRequest
from calstack.server.sse import named_event
from calstack.text.output import OutputParser

__all__ = ["ResponsesRequest", "understand_responses"]


class ResponsesRequest(msgspec.Struct, kw_only=True, frozen=True):
    """OpenAI's request."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stream: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    conversation: Any = None
    metadata: dict[str, str] | None = None
    truncation: str | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def chat_of(given: ResponsesRequest) -> ChatRequest:
    """The same request for the chat route.

    Raises:
        RequestError: naming the field that is wrong, or that needs stored answers.
    """
    for name in ("previous_response_id", "background", "conversation"):
        if getattr(given, name):
            raise _bad(name, "answers are not stored; send the whole conversation in input")
    functions = [tool for tool in given.tools or () if tool.get("type") == "function"]
    chat: dict[str, Any] = {
        "messages": _messages(given),
        "model": given.model,
        "max_tokens": given.max_output_tokens,
        "temperature": given.temperature,
        "top_p": given.top_p,
        "seed": given.seed,
        "stream": given.stream,
        "tools": [{"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} for tool in functions] or None,
        "tool_choice": given.tool_choice if functions else None,
        "parallel_tool_calls": given.parallel_tool_calls if functions else None,
        "response_format": _format(given.text),
        "reasoning_effort": (given.reasoning or {}).get("effort"),
        "chat_template_kwargs": given.chat_template_kwargs,
        "metadata": given.metadata,
        "overflow": _overflow(given.truncation),
        "user": given.user,
        "prompt_cache_key": given.prompt_cache_key,
    }
    try:
        return msgspec.convert(chat, ChatRequest)
    except msgspec.ValidationError as error:
        raise RequestError(str(error), where="$.input", param="input") from error


def _overflow(truncation: str | None) -> str | None:
    match truncation:
        case None | "disabled":
            return None
        case "auto":
            return "truncate"
        case _:
            raise _bad("truncation", "must be auto or disabled")


def _format(text: dict[str, Any] | None) -> Any:
    return (text or {}).get("format")


def _messages(given: ResponsesRequest) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = [{"role": "system", "content": given.instructions}] if given.instructions else []
    if isinstance(given.input, str):
        return [*out, {"role": "user", "content": given.input}]
    for place, item in enumerate(given.input):
        _add_item(out, item, f"input[{place}]")
    return out


def _add_item(out: list[dict[str, Any]], item: dict[str, Any], path: str) -> None:
    match item.get("type", "message"):
        case "message":
            message = {"role": item.get("role"), "content": item.get("content")}
            out.append(message)
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if not out or out[-1]["role"] != "assistant":
                out.append({"role": "assistant", "content": None})
            out[-1].setdefault("tool_calls", []).append(call)
        case "function_call_output":
            out.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        case "reasoning":
            pass  # templates drop old thoughts
        case kind:
            raise _bad(f"{path}.type", f"items of type {str(kind)[:40]!r} are not supported")


def _bad(param: str, what: str) -> RequestError:
    return RequestError(what, where=f"$.{param}", param=param)


def understand_responses(context: Context, given: ResponsesRequest, request_id: str) -> Plan:
    """Check a request."""
    work = ChatWork(context, chat_of(given))
    renderer = ResponsesRenderer(request_id, context.model.id, work, given)
    return dataclasses.replace(chat_plan(work, renderer), frame=named_event, done=b"", failed=renderer.failed)


class ResponsesRenderer:
    """Writes responses and their events."""

    def __init__(self, request_id: str, model: str, work: ChatWork, given: ResponsesRequest) -> None:
        self._request_id, self._model, self._work, self._given = request_id, model, work, given
        self._created = int(time.time())
        self._blocks = Blocks()
        self._sequence = 0
        self._begun = False
        self._parser: OutputParser

    def _response(self, end: End | None) -> dict[str, Any]:
        given, sampling = self._given, self._work.generate.sampling
        cut = end is not None and end.reason == "length"
        return {
            "id": f"resp_{self._request_id}",
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if end else None,
            "status": "incomplete" if cut else "completed" if end else "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": given.instructions,
            "max_output_tokens": given.max_output_tokens,
            "metadata": given.metadata or {},
            "model": self._model,
            "output": [self._item(block, whole=True) for block in self._blocks.all] if end else [],
            "parallel_tool_calls": given.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": (given.reasoning or {}).get("effort"), "summary": None},
            "store": False,
            "temperature": sampling.temperature,
            "text": given.text or {"format": {"type": "text"}},
            "tool_choice": given.tool_choice or "auto",
            "tools": given.tools or [],
            "top_p": sampling.top_p,
            "truncation": given.truncation or "disabled",
            "usage": self._usage(end) if end else None,
        }

    def _usage(self, end: End) -> dict[str, Any]:
        prompt, cached = self._work.prompt_tokens, end.usage.cached_tokens if end.usage else 0
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": end.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": end.reasoning_tokens},
            "total_tokens": prompt + end.completion_tokens,
        }

    def _item(self, block: Block, *, whole: bool) -> dict[str, Any]:
        id_, status = self._id(block), "completed" if whole else "in_progress"
        if block.kind == "call":
            call_id = f"call_{self._request_id}_{block.number}"
            arguments = block.text if whole else ""
            return {"id": id_, "type": "function_call", "call_id": call_id, "name": block.name, "arguments": arguments, "status": status}
        content = [_content(block)] if whole else []
        if block.kind == "reasoning":
            return {"id": id_, "type": "reasoning", "summary": [], "content": content, "encrypted_content": "", "status": status}
        return {"id": id_, "type": "message", "role": "assistant", "status": status, "content": content}

    def _id(self, block: Block) -> str:
        head = {"content": "msg", "reasoning": "rs", "call": "fc"}[block.kind]
        return f"{head}_{self._request_id}_{block.number}"

    def whole(self, choices: Sequence[Collected], generation: Generation) -> dict[str, Any]:
        (choice,) = choices
        parser = self._work.parser()
        list(self._blocks.take([*parser.push(choice.text), *parser.flush()]))
        return self._response(choice.end)

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        return [self._numbered(event) for event in self._events(delta)]

    def _numbered(self, event: dict[str, Any]) -> dict[str, Any]:
        event["sequence_number"], self._sequence = self._sequence, self._sequence + 1
        return event

    def _events(self, delta: Delta) -> Iterator[dict[str, Any]]:
        if not self._begun:
            self._begun, self._parser = True, self._work.parser()
            yield {"type": "response.created", "response": self._response(None)}
            yield {"type": "response.in_progress", "response": self._response(None)}
        parts = self._parser.push(delta.text) + (self._parser.flush() if delta.end is not None else [])
        for event in self._blocks.take(parts):
            yield from self._of_block(event)
        if delta.end is not None:
            for event in self._blocks.close():
                yield from self._of_block(event)
            kind = "response.incomplete" if delta.end.reason == "length" else "response.completed"
            yield {"type": kind, "response": self._response(delta.end)}

    def _of_block(self, event: BlockEvent) -> Iterator[dict[str, Any]]:
        block = event.block
        place = {"item_id": self._id(block), "output_index": block.number}
        inner = place if block.kind == "call" else {**place, "content_index": 0}
        name = {"content": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}[block.kind]
        more: dict[str, Any] = {"logprobs": []} if block.kind == "content" else {}
        if event.what == "open":
            yield {"type": "response.output_item.added", "output_index": block.number, "item": self._item(block, whole=False)}
            if block.kind != "call":
                yield {"type": "response.content_part.added", **inner, "part": _content(dataclasses.replace(block, text=""))}
        elif event.what == "grow":
            yield {"type": f"response.{name}.delta", **inner, "delta": event.text, **more}
        else:
            full = {"arguments": block.text, "name": block.name} if block.kind == "call" else {"text": block.text}
            yield {"type": f"response.{name}.done", **inner, **full, **more}
            if block.kind != "call":
                yield {"type": "response.content_part.done", **inner, "part": _content(block)}
            yield {"type": "response.output_item.done", "output_index": block.number, "item": self._item(block, whole=True)}

    def failed(self, answer: Answer) -> dict[str, Any]:
        """The event of an error in a stream."""
        error = answer.body["error"]
        return self._numbered({"type": "error", "code": error["type"], "message": error["message"], "param": error["param"]})

    def tail(self, generation: Generation) -> list[dict[str, Any]]:
        return []


def _content(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}
