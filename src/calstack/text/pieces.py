"""The bytes each token id stands for, read off the tokenizer's decoder description.

Two families cover the models we serve: byte-level BPE (each character of a piece stands for a byte, GPT-2's table) and
SentencePiece-like (▁ is a space, `<0xNN>` is a byte, the rest is literal).
"""

from __future__ import annotations

import json
import re
from typing import Any

import tokenizers

__all__ = ["PieceTable"]

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class PieceTable:
    """Bytes of token ids; computed on first use and kept.

    `special` holds the ids of special tokens, whose bytes are their written form (`bytes_of`) but which are not text (`text_bytes`).
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, tokenizer_json: str) -> None:
        added = tokenizer.get_added_tokens_decoder()
        self.special = frozenset(id_ for id_, token in added.items() if token.special)
        self._tokenizer = tokenizer
        self._cache: dict[int, bytes] = {id_: token.content.encode() for id_, token in added.items()}
        kinds = _decoder_kinds(json.loads(tokenizer_json).get("decoder"))
        self._byte_level = "ByteLevel" in kinds
        self._space = "\u2581" if {"Metaspace", "Replace"} & kinds else ""
        self._byte_fallback = "ByteFallback" in kinds
        self.strips_first_space = "Strip" in kinds or "Metaspace" in kinds

    def bytes_of(self, id_: int) -> bytes:
        """Bytes of a token, special ones in their written form; empty for an id outside the vocabulary."""
        if (known := self._cache.get(id_)) is None:
            known = self._cache[id_] = self._convert(self._tokenizer.id_to_token(id_) or "")
        return known

    def text_bytes(self, id_: int) -> bytes:
        """Bytes of a token in an answer: special tokens give none."""
        return b"" if id_ in self.special else self.bytes_of(id_)

    def _convert(self, piece: str) -> bytes:
        if self._byte_level:
            return _byte_level_bytes(piece)
        if self._byte_fallback and (found := _BYTE_PIECE.fullmatch(piece)):
            return bytes([int(found[1], 16)])
        return (piece.replace(self._space, " ") if self._space else piece).encode()


def _decoder_kinds(decoder: dict[str, Any] | None) -> set[str]:
    if decoder is None:
        return set()
    return {decoder["type"]}.union(*(_decoder_kinds(part) for part in decoder.get("decoders", ())))


def _byte_level_bytes(piece: str) -> bytes:
    """A character outside the table (a vocabulary made by hand) stands for its own UTF-8."""
    out = bytearray()
    for char in piece:
        value = _BYTE_OF.get(char)
        out.extend(char.encode()) if value is None else out.append(value)
    return bytes(out)


def _byte_table() -> dict[str, int]:
    """GPT-2's table: printable bytes stand for themselves, the others for U+0100 onwards in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_table()
