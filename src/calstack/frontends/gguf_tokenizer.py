"""A HF tokenizer.json from a GGUF file's vocabulary: byte-level BPE with the pre-tokeniser the file names, SentencePiece BPE, WordPiece."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from calstack.errors import UnsupportedError
from calstack.frontends.gguf_spm import sentencepiece_tokenizer
from calstack.frontends.gguf_wordpiece import wordpiece_tokenizer
from calstack.frontends.reading import bad

if TYPE_CHECKING:
    from tokenizers import Tokenizer, pre_tokenizers

    from calstack.frontends.metadata import Metadata

__all__ = ["PRE", "Pre", "adds_bos", "build_tokenizer"]

_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_THREE_DIGITS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_ONE_DIGIT = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclasses.dataclass(frozen=True, slots=True)
class Pre:
    """A pre-tokeniser: the text is split by each pattern in turn, matches and gaps both kept."""

    patterns: tuple[str, ...]
    nfc: bool = False
    whole_words: bool = False  # a word that is a token is taken without merging
    add_bos: bool = False  # when the file does not say


_LLAMA3 = Pre((_THREE_DIGITS,), whole_words=True, add_bos=True)
_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|]+"

# By tokenizer.ggml.pre.
PRE = {
    "default": Pre((_PUNCTUATION, _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": Pre((_GPT2,)),
    "gpt2": Pre((_GPT2,)),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": Pre((_ONE_DIGIT,), nfc=True),
    "refact": Pre((r"\p{N}", _GPT2)),
    "smollm": Pre((r"\p{N}", _GPT2)),
    "starcoder": Pre((r"\p{N}", _GPT2)),
}

_CONTROL, _USER_DEFINED = 3, 4  # token types; 1 normal, 2 unknown, 5 unused, 6 byte are plain vocabulary


def adds_bos(meta: Metadata) -> bool:
    """What `add_bos_token` means when the file does not hold it."""
    if meta.text("tokenizer.ggml.model", "") == "llama":
        return True
    name = meta.text("tokenizer.ggml.pre", "default")
    return name in PRE and PRE[name].add_bos


def _pre_of(meta: Metadata) -> Pre:
    kind = meta.text("tokenizer.ggml.model")
    if kind != "gpt2":
        raise UnsupportedError(
            f"the tokenizer model {kind[:32]!r} is not supported",
            where=f"{meta.path}: tokenizer.ggml.model",
            remedy="supported: gpt2 (byte-level BPE), llama (SentencePiece BPE), bert (WordPiece)",
        )
    name = meta.text("tokenizer.ggml.pre", "default")
    if name not in PRE:
        raise UnsupportedError(
            f"the pre-tokeniser {name[:32]!r} is not supported",
            where=f"{meta.path}: tokenizer.ggml.pre",
            remedy=f"supported: {', '.join(PRE)}",
        )
    return PRE[name]


def _vocabulary(meta: Metadata, rows: int) -> dict[str, int]:
    tokens = meta.texts("tokenizer.ggml.tokens")
    if not 1 <= len(tokens) <= rows:
        bad(meta.path, "tokenizer.ggml.tokens", f"{len(tokens)} tokens for an embedding of {rows} rows")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        bad(meta.path, "tokenizer.ggml.tokens", "a token appears twice")
    return vocabulary


def _merges(meta: Metadata, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    for index, line in enumerate(meta.texts("tokenizer.ggml.merges")):
        left, space, right = line.partition(" ")
        if not space or left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            bad(meta.path, "tokenizer.ggml.merges", f"merge {index} is not two tokens that make a third")
        merges.append((left, right))
    return merges


def _splitter(pre: Pre) -> pre_tokenizers.PreTokenizer:
    from tokenizers import Regex, pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*(pre_tokenizers.Split(Regex(p), "isolated") for p in pre.patterns), byte_level])


def _add_tokens(tokenizer: Tokenizer, meta: Metadata, vocabulary: dict[str, int]) -> None:
    from tokenizers import AddedToken

    if "tokenizer.ggml.token_type" not in meta.values:
        return
    types = meta.integers("tokenizer.ggml.token_type")
    if len(types) != len(vocabulary):
        bad(meta.path, "tokenizer.ggml.token_type", f"{len(types)} types for {len(vocabulary)} tokens")
    for token, kind in zip(vocabulary, types, strict=True):
        if kind in (_CONTROL, _USER_DEFINED) and token:
            tokenizer.add_tokens([AddedToken(token, special=kind == _CONTROL, normalized=False)])


def build_tokenizer(meta: Metadata, rows: int) -> bytes:
    """tokenizer.json as bytes, the same for the same metadata. `rows` is the embedding's: more tokens are refused."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary = _vocabulary(meta, rows)
    if meta.text("tokenizer.ggml.model") == "llama":
        return _finished(sentencepiece_tokenizer(meta, vocabulary), meta, vocabulary)
    if meta.text("tokenizer.ggml.model") == "bert":
        return _finished(wordpiece_tokenizer(meta, vocabulary), meta, vocabulary)
    pre = _pre_of(meta)
    tokenizer = Tokenizer(models.BPE(vocabulary, _merges(meta, vocabulary), ignore_merges=pre.whole_words))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _splitter(pre)
    tokenizer.decoder = decoders.ByteLevel()
    return _finished(tokenizer, meta, vocabulary)


def _finished(tokenizer: Tokenizer, meta: Metadata, vocabulary: dict[str, int]) -> bytes:
    _add_tokens(tokenizer, meta, vocabulary)
    text: str = tokenizer.to_str()
    return text.encode()
