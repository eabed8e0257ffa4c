from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from calstack.text.detokenize import Detokenizer, decode_all
from calstack.text.tokenizer import Tokenizer
from tests.support.tiny_model import special, tokenizer_json

TOKENIZER = Tokenizer(tokenizer_json())
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def streamed(ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(TOKENIZER.pieces)
    return [detokenizer.push(id_) for id_ in ids]


@given(texts)
def test_streamed_text_equals_whole_text_for_any_unicode(text: str) -> None:
    ids = TOKENIZER.encode(text, special=False)
    assert "".join(streamed(ids)) == decode_all(TOKENIZER.pieces, ids) == text


@given(texts, st.data())
def test_streamed_text_is_whole_when_each_byte_is_a_token(text: str, data: st.DataObject) -> None:
    single = {TOKENIZER.pieces.bytes_of(id_): id_ for id_ in range(TOKENIZER.vocab_size) if len(TOKENIZER.pieces.bytes_of(id_)) == 1}
    pieces = streamed([single[bytes([byte])] for byte in text.encode()])
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece or "\ufffd" in text for piece in pieces)


def test_character_of_several_tokens_comes_in_one_piece() -> None:
    ids = TOKENIZER.encode("漢", special=False)
    assert len(ids) == 3
    assert streamed(ids) == ["", "", "漢"]


def test_incomplete_character_at_the_end_is_dropped() -> None:
    ids = TOKENIZER.encode("a😀", special=False)
    assert "".join(streamed(ids[:-1])) == "a"


def test_bytes_that_never_become_a_character_give_a_replacement() -> None:
    half = TOKENIZER.encode("😀", special=False)[:2]
    assert "".join(streamed([*half, *TOKENIZER.encode("a", special=False)])) == "\ufffda"


def test_special_tokens_give_no_text_in_an_answer_but_show_when_detokenized() -> None:
    ids = [special("<|im_start|>"), *TOKENIZER.encode("hi", special=False)]
    assert "".join(streamed(ids)) == "hi"
    assert decode_all(TOKENIZER.pieces, ids) == "<|im_start|>hi"


SENTENCEPIECE = """{"version": "1.0", "added_tokens": [{"id": 0, "content": "<s>", "special": true, "single_word": false,
 "lstrip": false, "rstrip": false, "normalized": false}], "normalizer": null, "pre_tokenizer": null, "post_processor": null,
 "decoder": {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
 {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
 "model": {"type": "BPE", "vocab": {"<s>": 0, "<0xE6>": 1, "<0xBC>": 2, "<0xA2>": 3, "\u2581the": 4, "x": 5}, "merges": [],
 "byte_fallback": true}}"""


def test_sentencepiece_pieces_are_spaces_and_bytes() -> None:
    pieces = Tokenizer(SENTENCEPIECE).pieces
    detokenizer = Detokenizer(pieces)
    assert [detokenizer.push(id_) for id_ in (4, 1, 2, 3, 4, 5)] == [" the", "", "", "漢", " the", "x"]
    assert decode_all(pieces, (4, 4)) == "the the"
