"""Constraints become masks, and what cannot be kept is refused by name."""

from __future__ import annotations

import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from calstack.errors import RequestError
from calstack.grammar import Grammars, GrammarSpec, Matcher, grammar_source

EOS = 256


def _byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return _byte_tokenizer()


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer.to_str(), vocab=EOS + 1, eos=[EOS])


def _matcher(grammars: Grammars, kind: str, text: str) -> Matcher:
    return grammars.matcher(grammar_source(GrammarSpec(kind, text, "grammar")))  # type: ignore[arg-type]  # any kind under test


def _allowed(matcher: Matcher) -> set[int]:
    mask = matcher.mask()
    return {i for i in range(EOS + 1) if mask[i >> 5] >> (i & 31) & 1}


def _accepts(grammars: Grammars, tokenizer: Tokenizer, schema: object, document: str) -> bool:
    matcher = _matcher(grammars, "json_schema", json.dumps(schema))
    return all(matcher.consume(token) for token in tokenizer.encode(document).ids) and matcher.accepting


def test_gbnf_forces_exactly_its_text_across_multibyte_characters(grammars: Grammars, tokenizer: Tokenizer) -> None:
    text = "a😀漢é b"
    matcher = _matcher(grammars, "gbnf", f"root ::= {json.dumps(text, ensure_ascii=False)}")
    for token in tokenizer.encode(text).ids:
        assert _allowed(matcher) == {token}
        assert matcher.consume(token)
    assert _allowed(matcher) == {EOS}


def test_consume_refuses_a_token_outside_the_mask_and_keeps_its_state(grammars: Grammars, tokenizer: Tokenizer) -> None:
    matcher = _matcher(grammars, "regex", "ab")
    a, b = tokenizer.encode("ab").ids
    assert not matcher.consume(b)
    assert matcher.consume(a)
    matcher.rollback(1)
    assert _allowed(matcher) == {a}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"enum": ["x", "y"]}, '"x"', '"z"'),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"const": "é"}}}, '"é"', '"e"'),
        (
            {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False},
            '{"n": 3}',
            '{"m": 3}',
        ),
        ({"anyOf": [{"type": "null"}, {"type": "boolean"}]}, "true", "1"),
    ],
)
def test_schema_accepts_the_valid_and_refuses_the_invalid_document(
    grammars: Grammars, tokenizer: Tokenizer, schema: object, good: str, bad: str
) -> None:
    assert _accepts(grammars, tokenizer, schema, good)
    assert not _accepts(grammars, tokenizer, schema, bad)


@pytest.mark.parametrize("text", ["root ::= (", "asdf", "", "root ::= missing", "root ::= " + "(" * 60000 + '"a"' + ")" * 60000])
def test_gbnf_that_does_not_parse_is_refused(grammars: Grammars, text: str) -> None:
    with pytest.raises(RequestError) as caught:
        _matcher(grammars, "gbnf", text)
    assert caught.value.param == "grammar"


@pytest.mark.parametrize("keyword", ["uniqueItems", "not", "propertyNames", "contains"])
def test_unsupported_schema_keyword_is_refused_by_name(grammars: Grammars, keyword: str) -> None:
    value: object = True if keyword == "uniqueItems" else {"type": "string"}
    with pytest.raises(RequestError, match=keyword):
        _matcher(
            grammars, "json_schema", json.dumps({"type": "array" if keyword in ("uniqueItems", "contains") else "object", keyword: value})
        )


def test_schema_nested_too_deeply_is_refused_before_parsing(grammars: Grammars) -> None:
    text = '{"items":' * 3000 + "{}" + "}" * 3000
    with pytest.raises(RequestError, match="nested"):
        _matcher(grammars, "json_schema", text)


def test_added_token_in_brackets_that_is_not_special_is_text() -> None:
    text = _byte_tokenizer()
    text.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    size = text.get_vocab_size()
    grammars = Grammars(text.to_str(), vocab=size, eos=[EOS])
    matcher = grammars.matcher(grammar_source(GrammarSpec("lark", 'start: "<think>" /[a-z]+/', "grammar")))
    (think,) = text.encode("<think>").ids
    mask = matcher.mask()
    assert mask[think >> 5] >> (think & 31) & 1
    assert matcher.consume(think)
    free = grammars.matcher(grammar_source(GrammarSpec("regex", r"(.|\n)*", "grammar")))
    assert free.consume(think)


def test_white_space_of_documents_is_bounded(grammars: Grammars, tokenizer: Tokenizer) -> None:
    schema = {"type": "array", "items": {"type": "integer"}}
    assert _accepts(grammars, tokenizer, schema, "[\n  1,\n  2\n]")
    assert _accepts(grammars, tokenizer, schema, "[1, 2]")
    assert not _accepts(grammars, tokenizer, schema, "[" + "\n" * 3 + "1]")
    assert not _accepts(grammars, tokenizer, schema, "[" + " " * 40 + "1]")


def test_masks_ahead_are_those_of_walking_there_and_the_place_stays(grammars: Grammars, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("aab!").ids
    walked, ahead = _matcher(grammars, "regex", "a+b+c"), _matcher(grammars, "regex", "a+b+c")
    before = ahead.mask()
    masks = ahead.peek(ids)
    assert len(masks) == 3, "nothing behind the first id that is not allowed"
    for token, mask in zip(ids, masks, strict=False):
        assert walked.consume(token)
        assert (walked.mask() == mask).all()
    assert (ahead.mask() == before).all()


def test_masks_ahead_end_before_the_end_of_the_output(grammars: Grammars, tokenizer: Tokenizer) -> None:
    matcher = _matcher(grammars, "regex", "ab")
    assert len(matcher.peek([*tokenizer.encode("ab").ids, EOS])) == 1, "behind the whole text there is nothing to sample"
    assert not matcher.finished
    assert matcher.forced()[:2] == tokenizer.encode("ab").ids
