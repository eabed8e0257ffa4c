"""SentencePiece BPE from a GGUF file: the file holds tokens and scores, the merges are made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from calstack.frontends.reading import bad

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from calstack.frontends.metadata import Metadata

__all__ = ["merges_of", "sentencepiece_tokenizer"]

_SPACE = "▁"
_LONGEST = 256  # characters of a token that merges are made for: the work grows with the square


def sentencepiece_tokenizer(meta: Metadata, vocabulary: Mapping[str, int]) -> Tokenizer:
    """BPE over characters with spaces as ▁ and bytes for what has no token; added tokens are the caller's."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = meta.numbers("tokenizer.ggml.scores")
    if len(scores) != len(vocabulary):
        bad(meta.path, "tokenizer.ggml.scores", f"{len(scores)} scores for {len(vocabulary)} tokens")
    unknown = meta.integer("tokenizer.ggml.unknown_token_id", 0, len(vocabulary) - 1, 0)
    unk = next(token for token, index in vocabulary.items() if index == unknown)
    bpe = models.BPE(dict(vocabulary), merges_of(vocabulary, scores), unk_token=unk, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    prefixed = meta.flag("tokenizer.ggml.add_space_prefix", True)
    steps = [normalizers.Prepend(_SPACE)] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    back = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*back, *([decoders.Strip(" ", 1, 0)] if prefixed else [])])
    return tokenizer


def merges_of(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every split of every token into two tokens; best score of the whole first, then by ids of the halves."""
    merges: list[tuple[str, str]] = []
    order = sorted(vocabulary, key=lambda token: -scores[vocabulary[token]])
    for token in order:
        if len(token) > _LONGEST:
            continue
        halves = [(token[:at], token[at:]) for at in range(1, len(token))]
        merges += sorted(
            ((left, right) for left, right in halves if left in vocabulary and right in vocabulary),
            key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]),
        )
    return merges
