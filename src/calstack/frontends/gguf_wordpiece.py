"""WordPiece from a GGUF file, which writes the beginning of a word as ▁ and drops the ## of its other pieces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from calstack.frontends.reading import bad

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from calstack.frontends.metadata import Metadata

__all__ = ["wordpiece_tokenizer"]

_CLS, _SEP, _UNK = "cls", "seperator", "unknown"  # the format's spelling


def wordpiece_tokenizer(meta: Metadata, vocabulary: Mapping[str, int]) -> Tokenizer:
    """Lower-cased WordPiece that puts its begin and separator tokens around texts and pairs; added tokens are the caller's."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    pieces = {_plain(token): index for token, index in vocabulary.items()}
    if len(pieces) != len(vocabulary):
        bad(meta.path, "tokenizer.ggml.tokens", "two tokens stand for one piece")
    names = {index: piece for piece, index in pieces.items()}
    ids = {name: meta.integer(f"tokenizer.ggml.{name}_token_id", 0, len(names) - 1) for name in (_CLS, _SEP, _UNK)}
    tokenizer = Tokenizer(models.WordPiece(pieces, unk_token=names[ids[_UNK]], max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.BertProcessing((names[ids[_SEP]], ids[_SEP]), (names[ids[_CLS]], ids[_CLS]))
    return tokenizer


def _plain(token: str) -> str:
    if token.startswith("[") and token.endswith("]") and len(token) > 2:
        return token
    return token[1:] if token.startswith("▁") else "##" + token
