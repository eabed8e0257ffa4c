"""Ids to text as they arrive. A character is given out when its last byte has come; never half of it."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from calstack.text.pieces import PieceTable

__all__ = ["Detokenizer", "decode_all"]


class Detokenizer:
    """Incremental UTF-8 over token bytes.

    Bytes that can never become a character give U+FFFD at once. A character still incomplete at the end is dropped: `push` never
    gave any of it, so streamed and whole text agree.
    """

    __slots__ = ("_decoder", "_pieces")

    def __init__(self, pieces: PieceTable) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id_: int) -> str:
        """Text that became whole with this id (may be empty). Special tokens give no text."""
        return self._decoder.decode(self._pieces.text_bytes(id_))

    @property
    def incomplete(self) -> bool:
        """Whether the bytes so far end inside a character."""
        return bool(self._decoder.getstate()[0])


def decode_all(pieces: PieceTable, ids: Iterable[int]) -> str:
    """Text of a whole sequence, special tokens in their written form, damaged UTF-8 as U+FFFD."""
    data = b"".join(pieces.bytes_of(id_) for id_ in ids)
    if pieces.strips_first_space and data.startswith(b" "):
        data = data[1:]
    return data.decode("utf-8", "replace")
