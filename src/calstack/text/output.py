"""A model's raw text apart: what it thought, what it says, which tools it calls. Works on pieces of any size."""

from __future__ import annotations

import dataclasses
import enum
import json
import re
from collections.abc import Collection
from typing import Literal

__all__ = ["CLOSE_THOUGHT", "OPEN_THOUGHT", "OutputParser", "Part", "Thinking", "ToolFormat"]

OPEN_THOUGHT, CLOSE_THOUGHT = "<think>", "</think>"
_OPEN_CALL, _CLOSE_CALL = "<tool_call>", "</tool_call>"
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_HEAD_LIMIT = 1024  # characters in which a call must have named its function
_SPACE = " \t\r\n"


class ToolFormat(enum.Enum):
    """How a model writes calls."""

    NONE = "none"
    HERMES = "hermes"
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, Qwen's too."""
    LLAMA = "llama"
    """The whole answer is `{"name": …, "parameters": {…}}`."""


class Thinking(enum.Enum):
    """Where a thought may begin."""

    OFF = "off"
    MAYBE = "maybe"
    """The answer may begin with one."""
    OPEN = "open"
    """The prompt has begun it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A piece of an answer. A call begins with its name (`kind` call), its arguments follow in pieces of their JSON text."""

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str
    call: int = -1


class _State(enum.Enum):
    START = enum.auto()  # a thought may begin
    THOUGHT = enum.auto()
    CONTENT = enum.auto()
    HEAD = enum.auto()  # of a call
    ARGUMENTS = enum.auto()
    TAIL = enum.auto()  # of a call


class OutputParser:
    """Takes raw text, gives parts. The parts joined by kind do not depend on how the text was cut.

    Args:
        thinking: where a thought may begin; OFF leaves its marks in the text.
        tools: how calls are written; NONE leaves them in the text.
        names: functions that may be called; a call of another one stays text.
    """

    def __init__(self, *, thinking: Thinking = Thinking.OFF, tools: ToolFormat = ToolFormat.NONE, names: Collection[str] = ()) -> None:
        self._tools, self._names = tools, frozenset(names)
        self._state = {Thinking.OFF: _State.CONTENT, Thinking.MAYBE: _State.START, Thinking.OPEN: _State.THOUGHT}[thinking]
        self._buffer, self._space = "", ""
        self._fresh = thinking is not Thinking.OFF  # nothing of this kind has gone out: leading white space is dropped
        self._said = False
        self._plain = thinking is Thinking.OFF and tools is ToolFormat.NONE
        self._depth, self._in_text, self._escaped = 0, False, False
        self.calls = 0
        self.complete_calls = 0

    def push(self, text: str) -> list[Part]:
        """Parts that are certain now."""
        if self._plain:
            return [Part("content", text)] if text else []
        self._buffer += text
        return self._run(last=False)

    def flush(self) -> list[Part]:
        """The rest, at the end of the answer."""
        out = self._run(last=True)
        if self._state is _State.HEAD:
            tag = _OPEN_CALL if self._tools is ToolFormat.HERMES else ""
            out += self._say(tag + self._buffer)
        elif self._state in {_State.START, _State.CONTENT}:
            out += self._say(self._buffer)
        elif self._state is _State.THOUGHT:
            out += self._think(self._buffer)
        if self._space and self._state is not _State.THOUGHT and not self.calls and self._said:
            out.append(Part("content", self._space))
        self._buffer = self._space = ""
        return _merged(out)

    def _run(self, *, last: bool) -> list[Part]:
        steps = {
            _State.START: self._start,
            _State.THOUGHT: self._thought,
            _State.CONTENT: self._content,
            _State.HEAD: self._head,
            _State.ARGUMENTS: self._arguments,
            _State.TAIL: self._tail,
        }
        out: list[Part] = []
        while True:
            before = (self._state, self._buffer)
            out += steps[self._state]()
            if before == (self._state, self._buffer):
                return out if last else _merged(out)

    # --- thoughts ---------------------------------------------------------------------------------------------------------------

    def _start(self) -> list[Part]:
        begun = self._buffer.lstrip(_SPACE)
        if begun.startswith(OPEN_THOUGHT):
            self._state, self._buffer = _State.THOUGHT, begun[len(OPEN_THOUGHT) :]
        elif begun and not OPEN_THOUGHT.startswith(begun):
            self._state = _State.CONTENT
        return []

    def _thought(self) -> list[Part]:
        at = self._buffer.find(CLOSE_THOUGHT)
        if at >= 0:
            out = self._think(self._buffer[:at])
            self._state, self._buffer, self._fresh, self._space = _State.CONTENT, self._buffer[at + len(CLOSE_THOUGHT) :], True, ""
            return out
        cut = len(self._buffer) - _overlap(self._buffer, CLOSE_THOUGHT)
        ready, self._buffer = self._buffer[:cut], self._buffer[cut:]
        return self._think(ready)

    def _think(self, text: str) -> list[Part]:
        return self._without_edges("reasoning", text)

    # --- content ----------------------------------------------------------------------------------------------------------------

    def _content(self) -> list[Part]:
        if self._tools is ToolFormat.HERMES:
            return self._until_call()
        if self._tools is ToolFormat.LLAMA and not self._said:
            return self._maybe_call()
        ready, self._buffer = self._buffer, ""
        return self._say(ready)

    def _until_call(self) -> list[Part]:
        at = self._buffer.find(_OPEN_CALL)
        if at >= 0:
            out = self._say(self._buffer[:at])
            self._state, self._buffer = _State.HEAD, self._buffer[at + len(_OPEN_CALL) :]
            return out
        cut = len(self._buffer) - _overlap(self._buffer, _OPEN_CALL)
        ready, self._buffer = self._buffer[:cut], self._buffer[cut:]
        return self._say(ready)

    def _maybe_call(self) -> list[Part]:
        begun = self._buffer.lstrip(_SPACE + (";" if self.calls else ""))
        if begun.startswith("{"):
            self._state, self._buffer = _State.HEAD, begun
        elif begun:
            ready, self._buffer = self._buffer, ""
            return self._say(ready)
        return []

    def _say(self, text: str) -> list[Part]:
        out = self._without_edges("content", text)
        self._said = self._said or bool(out)
        return out

    def _without_edges(self, kind: Literal["content", "reasoning"], text: str) -> list[Part]:
        """White space at the edges is held back: it goes out when more text of the kind follows."""
        if self._fresh or (self.calls and not self._said):
            text = text.lstrip(_SPACE)
        bare = text.rstrip(_SPACE) if kind == "reasoning" or self._tools is ToolFormat.HERMES else text
        if not bare:
            self._space += text
            return []
        self._fresh = False
        out = Part(kind, self._space + bare)
        self._space = text[len(bare) :]
        return [out]

    # --- calls ------------------------------------------------------------------------------------------------------------------

    def _head(self) -> list[Part]:
        found = _HEAD.match(self._buffer)
        name = _json_text(found[1]) if found else None
        if found and name in self._names:
            self._state, self._buffer = _State.ARGUMENTS, self._buffer[found.end() :]
            self._depth, self._in_text, self._escaped, self._space = 0, False, False, ""
            self.calls += 1
            return [Part("call", name or "", self.calls - 1)]
        if found or len(self._buffer) > _HEAD_LIMIT or _CLOSE_CALL in self._buffer:
            text = (_OPEN_CALL if self._tools is ToolFormat.HERMES else "") + self._buffer
            self._state, self._buffer, self._said = _State.CONTENT, "", True
            return self._say(text)
        return []

    def _arguments(self) -> list[Part]:
        end = next((place + 1 for place, char in enumerate(self._buffer) if self._closes(char)), 0)
        text, self._buffer = (self._buffer[:end], self._buffer[end:]) if end else (self._buffer, "")
        if end:
            self._state = _State.TAIL
            self.complete_calls += 1
        return [Part("arguments", text, self.calls - 1)] if text else []

    def _closes(self, char: str) -> bool:
        """Follow one character of a JSON value; whether it is the last one."""
        if self._in_text:
            self._in_text = self._escaped or char != '"'
            self._escaped = not self._escaped and char == "\\"
            return False
        self._in_text = char == '"'
        self._depth += (char in "{[") - (char in "}]")
        return self._depth == 0 and char in "}]"

    def _tail(self) -> list[Part]:
        mark = _CLOSE_CALL if self._tools is ToolFormat.HERMES else "}"
        at = self._buffer.find(mark)
        if at >= 0:
            self._state, self._buffer = _State.CONTENT, self._buffer[at + len(mark) :]
        return []


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that `mark` begins with."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:size])), 0)


def _json_text(quoted: str) -> str | None:
    try:
        return str(json.loads(quoted))
    except ValueError:
        return None


def _merged(parts: list[Part]) -> list[Part]:
    """Neighbours of one kind in one piece."""
    out: list[Part] = []
    for part in parts:
        if out and (out[-1].kind, out[-1].call) == (part.kind, part.call) and part.kind != "call":
            out[-1] = Part(part.kind, out[-1].text + part.text, part.call)
        else:
            out.append(part)
    return out
