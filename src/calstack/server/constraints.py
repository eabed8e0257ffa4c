"""Structured output: the fields that bound an answer's text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from calstack.errors import RequestError
from calstack.grammar import GrammarSpec
from calstack.server.schemas import GenerationFields

__all__ = ["after_thinking", "constraint_of", "schema_spec"]

# vLLM's names inside structured_outputs, and its older fields.
_VLLM = {"json": "json_schema", "json_object": "json_object", "regex": "regex", "choice": "choice", "grammar": "gbnf"}
_OLDER = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
_THOUGHT = r"""
thought[lazy]: /(.|\n)*<\/think>/
GAP: /[ \n]{1,4}/
"""


def constraint_of(fields: GenerationFields) -> GrammarSpec | None:
    """The one constraint a request states, None when it states none.

    Raises:
        RequestError: when there are several, or one is incomplete.
    """
    found = list(_all(fields))
    if len(found) > 1:
        raise _bad(found[1].param, f"cannot go with {found[0].param}")
    return found[0] if found else None


def _all(fields: GenerationFields) -> Iterator[GrammarSpec]:
    yield from _of_format(fields.response_format)
    if fields.json_schema is not None:
        yield schema_spec(fields.json_schema, "json_schema")
    for name, kind in (("grammar", "gbnf"), ("ebnf", "gbnf"), ("regex", "regex")):
        if (text := getattr(fields, name)) is not None and (text or name == "regex"):
            yield _text_spec(kind, text, name)
    yield from _of_vllm(fields.structured_outputs)
    for name, inner in _OLDER.items():
        if (value := getattr(fields, name)) is not None:
            yield _vllm_spec(inner, value, name)


def _of_format(given: Any) -> Iterator[GrammarSpec]:
    if given is None:
        return
    match given.get("type") if isinstance(given, dict) else None:
        case "text":
            return
        case "json_object":
            schema = given.get("schema")
            yield GrammarSpec("json_object", "", "response_format") if schema is None else schema_spec(schema, "response_format.schema")
        case "json_schema":
            yield _format_schema(given)
        case _:
            raise _bad("response_format", "type must be text, json_object or json_schema")


def _format_schema(given: dict[str, Any]) -> GrammarSpec:
    """The schema stands in json_schema.schema; directly in response_format it is taken too."""
    inner = given.get("json_schema")
    if isinstance(inner, dict) and inner.get("schema") is not None:
        return schema_spec(inner["schema"], "response_format.json_schema.schema")
    if given.get("schema") is not None:
        return schema_spec(given["schema"], "response_format.schema")
    raise _bad("response_format.json_schema.schema", "the schema is missing")


def _of_vllm(given: Any) -> Iterator[GrammarSpec]:
    if given is None:
        return
    if not isinstance(given, dict):
        raise _bad("structured_outputs", "must be an object")
    for name, value in given.items():
        if value is not None:
            yield _vllm_spec(name, value, f"structured_outputs.{name}")


def _vllm_spec(name: str, value: Any, param: str) -> GrammarSpec:
    kind = _VLLM.get(name)
    if kind is None:
        raise _bad(param, f"is not one of {', '.join(_VLLM)}")
    if kind == "json_object":
        return GrammarSpec("json_object", "", param)
    if kind == "json_schema":
        return schema_spec(value, param)
    if kind == "choice":
        return GrammarSpec("choice", _json(value, param), param)
    return _text_spec(kind, value, param)


def _text_spec(kind: Any, text: Any, param: str) -> GrammarSpec:
    if not isinstance(text, str):
        raise _bad(param, "must be a string")
    return GrammarSpec(kind, text, param)


def schema_spec(schema: Any, param: str) -> GrammarSpec:
    """A constraint to a JSON schema, given as an object or as its JSON text."""
    return GrammarSpec("json_schema", schema if isinstance(schema, str) else _json(schema, param), param)


def _json(value: Any, param: str) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise _bad(param, f"cannot be read: {error}") from error


def after_thinking(source: str, *, begun: bool) -> str:
    """`source` for the answer of a model that thinks first; `begun` says that the prompt has opened the thought. A thought is free."""
    start = "start: thought GAP? @answer" if begun else 'start: ("<think>" thought GAP?)? @answer'
    is_bare = not source.lstrip().startswith("{")  # Lark text
    grammars = [{"lark_grammar": source}] if is_bare else json.loads(source)["grammars"]
    answer = {**grammars[0], "name": "answer"}
    return json.dumps({"grammars": [{"lark_grammar": start + _THOUGHT}, answer, *grammars[1:]]}, ensure_ascii=False)


def _bad(param: str, what: str) -> RequestError:
    return RequestError(what, where=f"$.{param}", param=param)
