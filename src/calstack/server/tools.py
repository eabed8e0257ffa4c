"""Tools of a chat request: what may be called, how the model is told, and the grammar that keeps calls well formed."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from calstack.errors import RequestError
from calstack.grammar import GrammarSpec, grammar_source
from calstack.server.schemas import ChatRequest
from calstack.text.output import ToolFormat

__all__ = ["Tools", "call_text", "format_of", "tools_of", "with_tools"]

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_PROMPT = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
_FREE = r"/(.|\n)*/ & ~/(.|\n)*<tool_call>(.|\n)*/"
_NOT_A_CALL = r"""/(.|\n)*/ & ~/\s*\{\s*"name"(.|\n)*/"""


@dataclasses.dataclass(frozen=True, slots=True)
class Tools:
    """The functions a request offers: `given` as the client wrote them, `schemas` of their arguments by name."""

    given: tuple[Mapping[str, Any], ...]
    schemas: Mapping[str, Any]
    forced: bool
    """Some function must be called."""
    several: bool
    """More than one call may be made."""

    def source(self, form: ToolFormat) -> str:
        """The grammar of an answer with these tools."""
        parts = [{"name": f"args{place}", **_schema_part(name, schema)} for place, (name, schema) in enumerate(self.schemas.items())]
        return json.dumps({"grammars": [{"lark_grammar": self._lark(form)}, *parts]}, ensure_ascii=False)

    def _lark(self, form: ToolFormat) -> str:
        key = "arguments" if form is ToolFormat.HERMES else "parameters"
        heads = [json.dumps(f'{{"name": {json.dumps(name)}, "{key}": ') for name in self.schemas]
        body = "body: " + " | ".join(f'{head} @args{place} "}}"' for place, head in enumerate(heads))
        rules = _hermes(self) if form is ToolFormat.HERMES else _llama(self)
        return "\n".join([*rules, body])


def _hermes(tools: Tools) -> list[str]:
    rules = [r'call: "<tool_call>\n" body "\n</tool_call>"']
    if tools.forced:
        return [r'start: call ("\n" call)*' if tools.several else "start: call", *rules]
    again = r'(LEAD body "\n</tool_call>")*' if tools.several else r'(LEAD body "\n</tool_call>")?'
    start = f"start: {again} REST" if tools.several else r'start: REST | lead body "\n</tool_call>"'
    start = start.replace("LEAD", "lead")
    return [start, r"lead[lazy]: /(.|\n)*<tool_call>\n/", f"REST: {_FREE}"]


def _llama(tools: Tools) -> list[str]:
    calls = r'body ("; " body)*' if tools.several else "body"
    return [f"start: {calls}"] if tools.forced else [f"start: {calls} | REST", f"REST: {_NOT_A_CALL}"]


def _schema_part(name: str, schema: Any) -> dict[str, Any]:
    text = json.dumps(schema, ensure_ascii=False)
    part: dict[str, Any] = json.loads(grammar_source(GrammarSpec("json_schema", text, f"tools.{name}")))["grammars"][0]
    return part


def tools_of(chat: ChatRequest) -> Tools | None:
    """The tools a request offers, None when it offers none or forbids their use.

    Raises:
        RequestError: for a malformed tool, a choice without tools, or a choice of a tool that is not there.
    """
    choice = chat.tool_choice
    if not chat.tools:
        if choice not in (None, "none", "auto"):  # may be an object
            raise _bad("tool_choice", "needs tools")
        return None
    schemas = dict(_tool(tool, f"tools[{place}]") for place, tool in enumerate(chat.tools))
    if len(schemas) != len(chat.tools):
        raise _bad("tools", "two tools have one name")
    if choice == "none":
        return None
    named = _named(choice, schemas)
    if named is not None:
        return Tools(tuple(chat.tools), {named: schemas[named]}, forced=True, several=False)
    forced = choice == "required"
    several = chat.parallel_tool_calls is True if forced else chat.parallel_tool_calls is not False
    return Tools(tuple(chat.tools), schemas, forced, several)


def _tool(tool: Any, path: str) -> tuple[str, Any]:
    if not isinstance(tool, dict) or tool.get("type", "function") != "function" or not isinstance(tool.get("function"), dict):
        raise _bad(path, "a tool is an object of type function with a function")
    name, schema = tool["function"].get("name"), tool["function"].get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _bad(f"{path}.function.name", "must be 1 to 128 letters, digits, or _ . : / -")
    if schema is not None and not isinstance(schema, dict):
        raise _bad(f"{path}.function.parameters", "must be a JSON schema")
    return name, {"type": "object", **(schema or {})}


def _named(choice: Any, schemas: Mapping[str, Any]) -> str | None:
    if choice in (None, "auto", "required"):
        return None
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else choice.get("name") if isinstance(choice, dict) else None
    if not isinstance(name, str):
        raise _bad("tool_choice", "must be auto, none, required, or name a function")
    if name not in schemas:
        raise _bad("tool_choice", f"there is no tool {name[:100]!r}")
    return name


def format_of(template: str) -> tuple[ToolFormat, bool]:
    """How a model with this chat template writes calls, and whether the template shows tools itself."""
    if "<tool_call>" in template:
        return ToolFormat.HERMES, "tools" in template
    if "tools" in template and '"parameters"' in template:
        return ToolFormat.LLAMA, True
    return ToolFormat.HERMES, False


def with_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages for a template that knows no tools: the system message tells of them, calls and results are text."""
    out = [_plain(message) for message in messages]
    if not tools:
        return out
    told = _PROMPT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if out[0]["role"] in {"system", "developer"}:
        out[0] = {**out[0], "content": f"{out[0]['content']}\n\n{told}".lstrip()}
        return out
    return [{"role": "system", "content": told}, *out]


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    texts = [message.get("content") or "", *(call_text(call["function"]) for call in calls)]
    return {**message, "content": "\n".join(filter(None, texts)), "tool_calls": None}


def call_text(function: Mapping[str, Any]) -> str:
    """A call as Hermes models write it."""
    given = function.get("arguments")
    arguments = given if isinstance(given, str) and given.strip() else json.dumps(given or {}, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {json.dumps(function["name"])}, "arguments": {arguments}}}\n</tool_call>'


def _bad(param: str, what: str) -> RequestError:
    return RequestError(what, where=f"$.{param}", param=param)
