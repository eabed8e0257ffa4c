"""What a request may ask its output to match, turned into one llguidance grammar text.

Bounds come first: the parsers behind this are recursive, so nesting is counted before any of them sees the text.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Literal

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from calstack.errors import RequestError

__all__ = ["MAX_GRAMMAR_BYTES", "MAX_NESTING", "GrammarSpec", "grammar_source"]

MAX_GRAMMAR_BYTES = 256 << 10
MAX_NESTING = 64
# Between the parts of a JSON document: a blank, or a new line and its indentation. Weak models fill any limit with white space.
_SPACE = {"whitespace_flexible": True, "whitespace_pattern": r" ?|\n[ \t]{0,32}"}

Kind = Literal["json_schema", "json_object", "regex", "gbnf", "lark", "choice"]


@dataclasses.dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A constraint as the request states it.

    `text` is a JSON document for json_schema and choice (a list of strings), ignored for json_object, else the grammar itself.
    `param` is the request field it came from, for errors.
    """

    kind: Kind
    text: str
    param: str


def grammar_source(spec: GrammarSpec) -> str:
    """The llguidance text of a constraint.

    Raises:
        RequestError: too large, nested too deeply, or not parseable; names `spec.param`.
    """
    _check_size(spec)
    try:
        return _convert(spec)
    except (ValueError, TypeError, RecursionError) as error:
        raise _refused(spec, f"the {spec.kind} does not parse: {error}") from error


def _convert(spec: GrammarSpec) -> str:
    if spec.kind == "json_object":
        return LLMatcher.grammar_from_json_schema(json.dumps(_spaced({"type": "object"})))
    if spec.kind == "json_schema":
        schema = json.loads(spec.text)
        _check_schema(spec, schema)
        return LLMatcher.grammar_from_json_schema(json.dumps(_spaced(schema), ensure_ascii=False))
    if spec.kind == "choice":
        return LLMatcher.grammar_from_lark(_choice(spec))
    if spec.kind == "regex":
        return LLMatcher.grammar_from_regex(spec.text)
    if not spec.text.strip():
        raise _refused(spec, "the grammar is empty")
    return LLMatcher.grammar_from_lark(spec.text if spec.kind == "lark" else _gbnf_to_lark(spec))


def _spaced(schema: Any) -> Any:
    """The schema with our white space, unless it says itself what it wants."""
    return schema if schema is False else {"x-guidance": _SPACE, **({} if schema is True else schema)}


def _gbnf_to_lark(spec: GrammarSpec) -> str:
    try:
        return any_to_lark(spec.text)
    except Exception as error:  # it raises bare Exception for undefined rules
        raise _refused(spec, f"the gbnf does not parse: {error}") from error


def _choice(spec: GrammarSpec) -> str:
    options = json.loads(spec.text)
    if not isinstance(options, list) or not options or not all(isinstance(o, str) and o for o in options):
        raise _refused(spec, "choice wants a list of non-empty strings")
    return "start: " + " | ".join(json.dumps(option) for option in options)


def _check_size(spec: GrammarSpec) -> None:
    size = len(spec.text.encode(errors="surrogatepass"))
    if size > MAX_GRAMMAR_BYTES:
        raise _refused(spec, f"the {spec.kind} has {size} bytes, {MAX_GRAMMAR_BYTES} are allowed")
    if _nesting(spec.text) > MAX_NESTING * (2 if spec.kind == "json_schema" else 1):
        raise _refused(spec, f"the {spec.kind} is nested deeper than {MAX_NESTING} levels")


def _nesting(text: str) -> int:
    """Deepest bracket nesting, brackets in strings counted too: an upper bound is all that is wanted."""
    depth = deepest = 0
    for char in text:
        if char in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in ")]}":
            depth = max(0, depth - 1)
    return deepest


def _check_schema(spec: GrammarSpec, schema: Any) -> None:
    if not isinstance(schema, (dict, bool)):
        raise _refused(spec, "a JSON schema is an object")


def _refused(spec: GrammarSpec, what: str) -> RequestError:
    return RequestError(what, where=f"$.{spec.param}", param=spec.param)
