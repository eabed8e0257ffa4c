"""POST /v1/chat/completions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from calstack.errors import NotInCalbin, RequestError
from calstack.grammar import GrammarSpec
from calstack.server.choice import Delta, End
from calstack.server.constraints import after_thinking, constraint_of
from calstack.server.context import Context
from calstack.server.exchange import Plan
from calstack.server.generation import Generation
from calstack.server.messages import chat_input
from calstack.server.model import ServedModel
from calstack.server.params import Generate, check_supported, generate_of, top_logprobs_of
from calstack.server.render import Collected, Envelope, chat_logprobs, extras_of, usage_of
from calstack.server.schemas import ChatRequest
from calstack.server.status import check_model
from calstack.server.thinking import Thoughts, thoughts_of
from calstack.server.tools import Tools, format_of, tools_of, with_tools
from calstack.text.output import OutputParser, Part, Thinking, ToolFormat
from calstack.text.pieces import PieceTable
from calstack.text.template import ChatInput, ChatTemplate
from calstack.text.thoughts import ThoughtMeter

__all__ = ["ChatRenderer", "ChatWork", "chat_plan", "understand_chat"]


def understand_chat(context: Context, chat: ChatRequest, request_id: str) -> Plan:
    """Check a chat request."""
    work = ChatWork(context, chat)
    model = context.model
    renderer = ChatRenderer(f"chatcmpl-{request_id}", model.id, model.fingerprint, work.generate, model.tokenizer.pieces, work.parser)
    return chat_plan(work, renderer, _top_logprobs(chat, context))


def chat_plan(work: ChatWork, renderer: Any, top_logprobs: int = -1) -> Plan:
    """The plan of any route that answers messages."""
    return Plan(
        generate=work.generate,
        prompts=1,
        tokenise=lambda: [work.prompt_ids()],
        renderer=renderer,
        top_logprobs=top_logprobs,
        constrain=work.constrain,
        meter=work.meter,
        close_thought=work.close_ids,
    )


class ChatWork:
    """One chat request on its way to a prompt: messages, tools, thoughts, constraint.

    Raises:
        RequestError: naming the field that is wrong.
        NotInCalbin: without a chat template.
    """

    def __init__(self, context: Context, chat: ChatRequest) -> None:
        model = context.model
        check_model(model, chat.model)
        check_supported(chat)
        self._model = model
        self.generate = generate_of(chat, model.vocabulary, context.config.limits, model.defaults)
        self._tools, self._spec = tools_of(chat), constraint_of(chat)
        if self._tools is not None and self._spec is not None:
            raise RequestError(f"cannot go with {self._spec.param}", where="$.tools", param="tools")
        if model.template is None:
            raise NotInCalbin("this calbin has no chat template", remedy="use /v1/completions")
        self._template: ChatTemplate = model.template
        self.format, self._shows = format_of(self._template.source)
        self._input = self._shown(chat_input(chat))
        self._thoughts: Thoughts = thoughts_of(chat, self._template.source)
        self.thinking = Thinking.OFF
        self.prompt_tokens = 0

    def _shown(self, given: ChatInput) -> ChatInput:
        """Tools go through the template where it knows them, else into the messages."""
        if self._shows:
            return given
        return dataclasses.replace(given, messages=with_tools(given.messages, given.tools), tools=())

    def prompt(self) -> str:
        """The rendered prompt, without BOS; may take long."""
        return self._thoughts.prompt(self._template.render(self._input, self._model.tokenizer), self._input).shown()

    def prompt_ids(self) -> list[int]:
        """Ids of the prompt; sets `thinking`. May take long."""
        rendered = self._thoughts.prompt(self._template.render(self._input, self._model.tokenizer), self._input)
        self.thinking = self._thoughts.state(rendered.text)
        ids = self._model.tokenizer.encode_prompt(rendered)
        self.prompt_tokens = len(ids)
        return ids

    @property
    def constrain(self) -> Callable[[], str] | None:
        """Gives the checked grammar, after `prompt_ids`; None without any."""
        return self._grammar if self._tools is not None or self._spec is not None else None

    def _grammar(self) -> str:
        source, param = _source_of(self._model, self._tools, self._spec, self.format)
        if self.thinking is not Thinking.OFF:
            source = after_thinking(source, begun=self.thinking is Thinking.OPEN)
        self._model.constraints.check(source, param)
        return source

    def parser(self) -> OutputParser:
        """A parser for one answer."""
        if self._tools is None:
            return OutputParser(thinking=self.thinking if self._thoughts.separate else Thinking.OFF)
        thinking = self.thinking if self._thoughts.separate else Thinking.OFF
        return OutputParser(thinking=thinking, tools=self.format, names=self._tools.schemas)

    def meter(self, limit: int) -> ThoughtMeter | None:
        """Counts the thought of one answer of at most `limit` tokens; None when there can be none."""
        if self.thinking is Thinking.OFF:
            return None
        return ThoughtMeter(self.thinking, self._thoughts.budget(limit, len(self.close_ids())))

    def close_ids(self) -> list[int]:
        """Ids that end a thought."""
        return self._model.tokenizer.encode("\n</think>\n\n", special=True)


def _source_of(model: ServedModel, tools: Tools | None, spec: GrammarSpec | None, form: ToolFormat) -> tuple[str, str]:
    if tools is not None:
        return tools.source(form), "tools"
    assert spec is not None
    return model.constraints.source(spec), spec.param


def _top_logprobs(chat: ChatRequest, context: Context) -> int:
    if not chat.logprobs:
        if chat.top_logprobs is not None and chat.top_logprobs != 0:
            raise RequestError("needs logprobs", where="$.top_logprobs", param="top_logprobs")
        return -1
    return top_logprobs_of(chat.top_logprobs, context.config.limits, "top_logprobs")


class ChatRenderer:
    """Writes chat answers. `parser` makes the parser of one choice, once its prompt is known."""

    def __init__(
        self, id_: str, model: str, fingerprint: str, generate: Generate, pieces: PieceTable, parser: Callable[[], OutputParser]
    ) -> None:
        self._whole = Envelope(id_, "chat.completion", model, fingerprint)
        self._chunk = Envelope(id_, "chat.completion.chunk", model, fingerprint)
        self._id, self._generate, self._pieces, self._parser = id_, generate, pieces, parser
        self._parsers: dict[int, OutputParser] = {}

    def whole(self, choices: Sequence[Collected], generation: Generation) -> dict[str, Any]:
        answer = self._whole.around([self._choice(choice) for choice in choices]) | {"usage": usage_of(generation)}
        if choices[0].end is not None:
            answer |= extras_of(choices[0].end, self._generate)
        return answer

    def _choice(self, choice: Collected) -> dict[str, Any]:
        assert choice.end is not None
        parser = self._parser()
        parts = [*parser.push(choice.text), *parser.flush()]
        return {
            "index": choice.index,
            "message": self._message(choice.index, parts),
            "logprobs": chat_logprobs(choice.tokens, self._pieces) if choice.tokens else None,
            "finish_reason": _finish(choice.end, parser),
        }

    def _message(self, index: int, parts: Sequence[Part]) -> dict[str, Any]:
        said, thought = (joined(parts, kind) for kind in ("content", "reasoning"))
        calls = calls_of(parts)
        message: dict[str, Any] = {"role": "assistant", "content": said if said or not calls else None, "refusal": None}
        if thought:
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = [_call(self._call_id(index, place), name, args) for place, (name, args) in enumerate(calls)]
        return message

    def _call_id(self, index: int, call: int) -> str:
        return f"call_{self._id.removeprefix('chatcmpl-')}_{index}_{call}"

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        out = []
        if (parser := self._parsers.get(delta.index)) is None:
            parser = self._parsers[delta.index] = self._parser()
            out.append(self._piece(delta.index, {"role": "assistant", "content": ""}))
        parts = parser.push(delta.text) + (parser.flush() if delta.end is not None else [])
        pieces = [self._piece(delta.index, self._delta(delta.index, part)) for part in parts]
        if delta.tokens:
            pieces = pieces or [self._piece(delta.index, {"content": ""})]
            pieces[0]["choices"][0]["logprobs"] = chat_logprobs(delta.tokens, self._pieces)
        out += pieces
        if delta.end is not None:
            out.append(self._last(delta.index, delta.end, parser))
        return out

    def _delta(self, index: int, part: Part) -> dict[str, Any]:
        if part.kind == "content":
            return {"content": part.text}
        if part.kind == "reasoning":
            return {"reasoning_content": part.text}
        if part.kind == "call":
            return {"tool_calls": [{"index": part.call, **_call(self._call_id(index, part.call), part.text, "")}]}
        return {"tool_calls": [{"index": part.call, "function": {"arguments": part.text}}]}

    def _last(self, index: int, end: End, parser: OutputParser) -> dict[str, Any]:
        return self._piece(index, {}, _finish(end, parser)) | extras_of(end, self._generate)

    def _piece(self, index: int, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        return self._chunk.around([{"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}])

    def tail(self, generation: Generation) -> list[dict[str, Any]]:
        return [self._chunk.around([]) | {"usage": usage_of(generation)}] if self._generate.include_usage else []


def joined(parts: Sequence[Part], kind: str) -> str:
    """The text of one kind."""
    return "".join(part.text for part in parts if part.kind == kind)


def calls_of(parts: Sequence[Part]) -> list[tuple[str, str]]:
    """Name and arguments of every call, in order."""
    names = [part.text for part in parts if part.kind == "call"]
    return [(name, joined([part for part in parts if part.call == place], "arguments")) for place, name in enumerate(names)]


def _call(id_: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def _finish(end: End, parser: OutputParser) -> str | None:
    """A call cut by the token limit is a length; whole calls are tool_calls, whatever ended the answer."""
    return "tool_calls" if parser.calls and parser.calls == parser.complete_calls else end.reason
