"""SentencePiece tokenizers from GGUF metadata, on a vocabulary small enough to work out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from calstack.errors import SourceError
from calstack.frontends.gguf_spm import merges_of
from calstack.frontends.gguf_tokenizer import adds_bos, build_tokenizer
from calstack.frontends.metadata import Metadata

PIECES = ["<unk>", "<s>", "</s>", "<tag>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "c", "ab", "bc", "▁a", "▁ab", "abc"]
SCORES = {"ab": -1.0, "▁a": -2.0, "bc": -3.0, "▁ab": -4.0, "abc": -5.0}


def metadata(**changed: Any) -> Metadata:
    types = np.ones(len(PIECES), np.int32)
    types[:4], types[4:260] = (2, 3, 3, 4), 6
    values = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": PIECES,
        "tokenizer.ggml.scores": np.array([SCORES.get(piece, -9.0) for piece in PIECES], np.float32),
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return Metadata(Path("x.gguf"), values | {f"tokenizer.ggml.{key}": item for key, item in changed.items()})


def built(**changed: Any) -> Tokenizer:
    return Tokenizer.from_buffer(build_tokenizer(metadata(**changed), len(PIECES)))


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("abc", ["▁ab", "c"]),  # ab before bc by score, then the space before it
        ("bc", ["▁", "bc"]),
        ("a ab", ["▁a", "▁ab"]),
        ("é", ["▁", "<0xC3>", "<0xA9>"]),
        ("a<tag>b", ["▁a", "<tag>", "▁", "b"]),
    ],
)
def test_pieces_are_merged_by_score_and_the_rest_falls_back_to_bytes(text: str, pieces: list[str]) -> None:
    assert built().encode(text, add_special_tokens=False).tokens == pieces


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("text", ["abc", " a  b", "é中", "cab é"])
def test_texts_come_back(text: str, prefix: bool) -> None:
    tokenizer = built(add_space_prefix=prefix)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text


def test_without_a_space_prefix_the_text_starts_as_it_is() -> None:
    assert built(add_space_prefix=False).encode("abc").tokens == ["abc"]


def test_merges_come_best_score_first_then_by_ids() -> None:
    vocabulary = {piece: index for index, piece in enumerate(PIECES)}
    scores = [SCORES.get(piece, -9.0) for piece in PIECES]
    assert merges_of(vocabulary, scores) == [("a", "b"), ("▁", "a"), ("b", "c"), ("▁", "ab"), ("▁a", "b"), ("a", "bc"), ("ab", "c")]


def test_a_begin_token_is_added_unless_the_file_says_no() -> None:
    assert adds_bos(metadata())


@pytest.mark.parametrize("scores", [np.zeros(3, np.float32), np.full(len(PIECES), np.nan, np.float32), None, [1, 2]])
def test_scores_that_do_not_fit_are_refused(scores: Any) -> None:
    with pytest.raises(SourceError, match=r"score|finite"):
        built(scores=scores)
