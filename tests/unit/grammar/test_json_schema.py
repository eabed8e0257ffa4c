"""Features of JSON Schema: each is enforced as `jsonschema` understands it, or refused by name."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer

from calstack.errors import RequestError
from calstack.grammar import Grammars, GrammarSpec, Matcher, grammar_source
from calstack.text.pieces import PieceTable
from tests.support.tiny_model import special, tokenizer_json, vocab_size

END = special("<|im_end|>")
INT = {"type": "integer"}
TEXT = {"type": "string"}
OPEN: dict[str, Any] = {"type": "object", "properties": {"a": {}, "b": {}}}
# name: schema, documents that are valid, documents that are not
ENFORCED: dict[str, tuple[Any, list[str], list[str]]] = {
    "type string": (TEXT, ['"a"', '""', '"漢😀"'], ["1", "null"]),
    "type integer": (INT, ["1", "-3", "0"], ["1.5", '"a"']),
    "type number": ({"type": "number"}, ["1.5", "1e3", "-2"], ["true", '"1"']),
    "type boolean": ({"type": "boolean"}, ["true", "false"], ["0"]),
    "type null": ({"type": "null"}, ["null"], ["0"]),
    "several types": ({"type": ["integer", "null"]}, ["1", "null"], ['"a"']),
    "enum": ({"enum": [1, "a", None, {"x": []}]}, ['"a"', "null", '{"x": []}'], ["2", '"b"']),
    "const": ({"const": {"a": [1, "é"]}}, ['{"a": [1, "é"]}'], ['{"a": [2]}']),
    "properties and required": (
        {"type": "object", "properties": {"a": INT, "c": TEXT}, "required": ["a"]},
        ['{"a": 1}', '{"a": 1, "b": 2}', '{"a": 1, "c": "x"}'],
        ["{}", '{"a": "x"}', '{"a": 1, "c": 2}'],
    ),
    "no additional properties": (
        {"type": "object", "properties": {"a": {}}, "additionalProperties": False}, ["{}", '{"a": 1}'], ['{"b": 1}', '{"a": 1, "b": 1}'],
    ),
    "typed additional properties": ({"type": "object", "additionalProperties": INT}, ["{}", '{"q": 1}'], ['{"q": "x"}']),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^x_": INT}, "additionalProperties": False}, ['{"x_a": 1}'], ['{"x_a": "s"}', '{"y": 1}'],
    ),
    "minProperties": ({"type": "object", "minProperties": 1, "additionalProperties": INT}, ['{"a": 1}'], ["{}"]),
    "maxProperties": ({"type": "object", "maxProperties": 1, "additionalProperties": INT}, ["{}", '{"a": 1}'], ['{"a": 1, "b": 2}']),
    "items": ({"type": "array", "items": INT}, ["[1, 2]", "[]"], ['["a"]']),
    "prefixItems": (
        {"type": "array", "prefixItems": [INT, TEXT], "items": False}, ['[1, "a"]'], ['["a"]', '[1, "a", 2]'],
    ),
    "minItems": ({"type": "array", "items": INT, "minItems": 2}, ["[1, 2]", "[1, 2, 3]"], ["[1]", "[]"]),
    "maxItems": ({"type": "array", "items": INT, "maxItems": 1}, ["[]", "[1]"], ["[1, 2]"]),
    "minLength": ({"type": "string", "minLength": 3}, ['"abc"', '"漢漢漢"'], ['"ab"', '"漢漢"']),
    "maxLength": ({"type": "string", "maxLength": 2}, ['"ab"', '""', '"漢é"'], ['"abc"']),
    "pattern": ({"type": "string", "pattern": "^[a-c]+$"}, ['"abc"'], ['"abd"', '""']),
    "pattern that is not anchored": ({"type": "string", "pattern": "b{2}", "maxLength": 20}, ['"abba"'], ['"aba"']),
    "format date": ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2024-13-01"', '"x"']),
    "format date-time": ({"type": "string", "format": "date-time"}, ['"2024-02-29T10:00:00Z"'], ['"2024-02-29"']),
    "format uuid": ({"type": "string", "format": "uuid"}, ['"123e4567-e89b-12d3-a456-426614174000"'], ['"123e4567"']),
    "format ipv4": ({"type": "string", "format": "ipv4"}, ['"1.2.3.4"'], ['"1.2.3.999"']),
    "format email": ({"type": "string", "format": "email"}, ['"a@b.cd"'], ['"x"']),
    "minimum and maximum": ({"type": "integer", "minimum": -5, "maximum": 105}, ["-5", "17", "105"], ["-6", "106"]),
    "exclusive bounds": ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 2}, ["0.1", "1.99"], ["0", "2", "-1"]),
    "bounds without a type": ({"minimum": 3}, ["3", '"a"', "[]"], ["2"]),
    "multipleOf": ({"type": "integer", "multipleOf": 3, "minimum": 0, "maximum": 30}, ["9", "0"], ["10"]),
    "anyOf": ({"anyOf": [INT, {"type": "boolean"}]}, ["1", "true"], ['"a"']),
    "oneOf of what cannot both match": ({"oneOf": [INT, {"type": "boolean"}]}, ["1", "true"], ['"a"']),
    "allOf": (
        {"allOf": [{"type": "object", "properties": {"a": INT}, "required": ["a"]}, {"properties": {"b": TEXT}, "required": ["b"]}]},
        ['{"a": 1, "b": "x"}'],
        ['{"a": 1}', '{"a": 1, "b": 2}'],
    ),
    "reference into $defs": ({"$ref": "#/$defs/a", "$defs": {"a": INT}}, ["1"], ['"a"']),
    "reference beside other keys": ({"$ref": "#/$defs/a", "maximum": 5, "$defs": {"a": INT}}, ["1"], ["6"]),
    "reference to itself": (
        {"type": "object", "properties": {"n": {"$ref": "#"}}, "additionalProperties": False}, ["{}", '{"n": {"n": {}}}'], ['{"n": 1}'],
    ),
    "$anchor": ({"$ref": "#x", "$defs": {"a": {"$anchor": "x", "type": "integer"}}}, ["1"], ['"a"']),
    "required without a type": ({"required": ["a"]}, ['{"a": 1}', "1"], ["{}"]),
    "annotations": (
        {"title": "t", "description": "d", "default": 1, "examples": [1], "deprecated": True, "$comment": "c", "type": "integer"},
        ["1"],
        ['"a"'],
    ),
    "anything": ({}, ["1", '{"a": [null]}'], []),
    "true": (True, ["1", "[]"], []),
}  # fmt: skip
REFUSED: dict[str, Any] = {
    "uniqueItems": {"type": "array", "items": INT, "uniqueItems": True},
    "contains": {"type": "array", "contains": INT},
    "minContains": {"type": "array", "contains": INT, "minContains": 2},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^a"}},
    "not": {"not": INT},
    "if": {"if": INT, "then": {"minimum": 3}, "else": TEXT},
    "oneOf": {"oneOf": [INT, {"type": "number"}]},
    "dependentRequired": {**OPEN, "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {**OPEN, "dependentSchemas": {"a": {"required": ["b"]}}},
    "dependencies": {**OPEN, "dependencies": {"a": ["b"]}},
    "unevaluatedProperties": {**OPEN, "unevaluatedProperties": False},
    "unevaluatedItems": {"type": "array", "prefixItems": [{}], "unevaluatedItems": False},
    "$dynamicRef": {"$dynamicRef": "#x", "$defs": {"a": {"$dynamicAnchor": "x", "type": "integer"}}},
    "zzz": {"type": "string", "format": "zzz"},
    "example.com": {"$ref": "https://example.com/x"},
    "nowhere": {"$ref": "#/$defs/nowhere"},
    "multipleOf": {"type": "number", "multipleOf": 1e-300},
    "nonsense": {"type": "nonsense"},
    "false": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_str(tokenizer_json())


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(tokenizer_json(), vocab=vocab_size(), eos=[END])


def matcher_of(grammars: Grammars, schema: Any) -> Matcher:
    return grammars.matcher(grammar_source(GrammarSpec("json_schema", json.dumps(schema), "schema")), param="schema")


def accepts(grammars: Grammars, tokenizer: Tokenizer, schema: Any, document: str) -> bool:
    matcher = matcher_of(grammars, schema)
    return all(matcher.consume(token) for token in tokenizer.encode(document).ids) and matcher.accepting


def valid(schema: Any, document: str) -> bool:
    checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    return bool(checker.is_valid(json.loads(document)))


@pytest.mark.parametrize("name", ENFORCED)
def test_feature_is_enforced(grammars: Grammars, tokenizer: Tokenizer, name: str) -> None:
    schema, good, bad = ENFORCED[name]
    assert all(valid(schema, document) for document in good)
    assert not any(valid(schema, document) for document in bad if "date-time" not in name)
    assert [document for document in good if not accepts(grammars, tokenizer, schema, document)] == []
    assert [document for document in bad if accepts(grammars, tokenizer, schema, document)] == []


@pytest.mark.parametrize("name", REFUSED)
def test_feature_that_is_not_enforced_is_refused_by_name(grammars: Grammars, name: str) -> None:
    with pytest.raises(RequestError, match=name.replace("$", r"\$")) as caught:
        matcher_of(grammars, REFUSED[name])
    assert caught.value.param == "schema"


def test_thirty_one_features_are_covered() -> None:
    assert len(ENFORCED) + len(REFUSED) >= 31


class Walk:
    """Draws documents through the masks, so as a model that wants nothing in particular would."""

    def __init__(self, grammars: Grammars, tokenizer: Tokenizer) -> None:
        self.grammars = grammars
        pieces = PieceTable(tokenizer, tokenizer_json())
        self.bytes_of = [pieces.bytes_of(id_) for id_ in range(vocab_size())]
        self.brief = {id_ for id_, data in enumerate(self.bytes_of) if data in (b'"', b"}", b"]", b'"}', b"0", b"1")}

    def document(self, schema: Any, seed: int, most: int = 400) -> str | None:
        """One document, None when it does not end within `most` tokens."""
        matcher, rng, out = matcher_of(self.grammars, schema), random.Random(seed), b""
        for step in range(most):
            mask = matcher.mask()
            allowed = [id_ for id_ in range(vocab_size()) if mask[id_ >> 5] >> (id_ & 31) & 1]
            if END in allowed and (len(allowed) == 1 or rng.random() < 0.5):
                return out.decode()
            allowed = [id_ for id_ in allowed if id_ != END]
            brief = [id_ for id_ in allowed if id_ in self.brief]
            token = rng.choice(brief if brief and rng.random() < step / 40 else allowed)
            assert matcher.consume(token)
            out += self.bytes_of[token]
        return None


def test_documents_drawn_through_the_masks_validate(grammars: Grammars, tokenizer: Tokenizer) -> None:
    walk, finished = Walk(grammars, tokenizer), 0
    for name, (schema, _, _) in ENFORCED.items():
        for seed in range(6):
            document = walk.document(schema, seed)
            if document is not None:
                assert valid(schema, document), (name, document)
                finished += 1
    assert finished >= 200
