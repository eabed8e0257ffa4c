"""Text to ids and ids to bytes, over the calbin's tokenizer.json.

Special tokens are parsed only where the caller says so. Ids go back to text through bytes, never through the library's decoder, so
that streamed and whole text are the same by construction (`detokenize.py`).
"""

from __future__ import annotations

import dataclasses
import re
import threading
from pathlib import Path

import tokenizers

from calstack.errors import ArtifactError, RequestError
from calstack.text.pieces import PieceTable

__all__ = ["SPECIAL_LIMIT", "PromptText", "Tokenizer"]

SPECIAL_LIMIT = 1 << 16  # most special tokens of a vocabulary


@dataclasses.dataclass(frozen=True, slots=True)
class PromptText:
    """A rendered prompt. `guard` is a character that marks special tokens which came from a user; empty when there are none."""

    text: str
    guard: str = ""

    def shown(self) -> str:
        """The prompt as it reads."""
        return self.text.replace(self.guard, "") if self.guard else self.text


class Tokenizer:
    """Encodes and knows each id's bytes. Safe to use from several threads.

    Args:
        tokenizer_json: contents of a HF tokenizer.json.
        bos_id: put first by `encode(bos=True)` unless the text begins with it; None = the model has none.
        where: file named in errors.

    Raises:
        ArtifactError: when the file cannot be read.
    """

    def __init__(self, tokenizer_json: str, *, bos_id: int | None = None, where: str = "tokenizer.json") -> None:
        self._json = tokenizer_json
        self._parsing = _load(tokenizer_json, where)
        self._plain: tokenizers.Tokenizer | None = None
        self._cutting: tokenizers.Tokenizer | None = None
        self._lock = threading.Lock()
        self.bos_id = bos_id
        self.pieces = PieceTable(self._parsing, tokenizer_json)
        self.vocab_size: int = self._parsing.get_vocab_size(with_added_tokens=True)
        self._special = {token.content: id_ for id_, token in self._parsing.get_added_tokens_decoder().items() if token.special}
        self._special_pattern = _alternatives(self._special)

    @property
    def json(self) -> str:
        """The tokenizer.json."""
        return self._json

    def special_id(self, *names: str) -> int | None:
        """Id of the first of these special tokens that there is."""
        return next((self._special[name] for name in names if name in self._special), None)

    @classmethod
    def from_file(cls, path: Path, *, bos_id: int | None = None) -> Tokenizer:
        """Read a tokenizer.json."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ArtifactError(f"cannot be read: {error}", where=str(path), remedy="compile the model again") from error
        return cls(text, bos_id=bos_id, where=str(path))

    def encode(self, text: str, *, special: bool, bos: bool = False) -> list[int]:
        """Ids of `text`.

        Args:
            text: any text without lone surrogates.
            special: whether special tokens written in the text become their ids.
            bos: whether the sequence must begin with exactly one BOS (where the model has one).

        Raises:
            RequestError: when the text is not valid Unicode.
        """
        _check_unicode(text)
        ids = self._ids(self._parsing if special else self._plain_tokenizer(), text)
        return self._with_bos(ids) if bos else ids

    def encode_text(self, text: str, other: str | None = None, *, limit: int = 0) -> tuple[list[int], int]:
        """Ids of a text, or of a pair, for an encoder: with the special tokens it wants around them, and none of a user's own.

        Args:
            text: any text without lone surrogates.
            other: the second of a pair.
            limit: most ids; the end of the longer text is cut off. 0 = nothing is.

        Returns:
            The ids, and where the second segment begins (0 = there is none).

        Raises:
            RequestError: when a text is not valid Unicode.
        """
        for one in (text, other or ""):
            _check_unicode(one)
        found = self._plain_tokenizer().encode(text, other, add_special_tokens=True)
        if limit and len(found.ids) > limit:
            with self._lock:
                cutting = _load(self._json, "tokenizer.json") if self._cutting is None else self._cutting
                self._cutting = cutting
                cutting.encode_special_tokens = True
                cutting.enable_truncation(limit, strategy="longest_first")
                found = cutting.encode(text, other, add_special_tokens=True)
        types: list[int] = found.type_ids
        return found.ids, types.index(1) if 1 in types else 0

    def encode_prompt(self, prompt: PromptText, *, bos: bool = True) -> list[int]:
        """Ids of a rendered template: its special tokens are parsed, those that a user wrote stay plain text."""
        if not prompt.guard:
            return self.encode(prompt.text, special=True, bos=bos)
        _check_unicode(prompt.text)
        ids: list[int] = []
        plain = self._plain_tokenizer()
        pattern = re.compile(f"{self._special_pattern.pattern}(?!{prompt.guard})")
        for part in pattern.split(prompt.text):
            if part in self._special:
                ids.append(self._special[part])
            elif part:
                ids.extend(self._ids(plain, part.replace(prompt.guard, "")))
        return self._with_bos(ids) if bos else ids

    def guard_for(self, texts: list[str]) -> str:
        """A character to guard the special tokens in `texts` with (`guarded`), empty when they hold none.

        Raises:
            RequestError: when the texts use every non-character there is for it.
        """
        if not any(self._special_pattern.search(text) for text in texts):
            return ""
        for code in range(0xFDD0, 0xFDF0):
            if not any(chr(code) in text for text in texts):
                return chr(code)
        raise RequestError("the messages hold every Unicode non-character", remedy="remove them", param="messages")

    def guarded(self, text: str, guard: str) -> str:
        """`text` with `guard` put after each character of its special tokens, so that `encode_prompt` takes none of them as one."""
        return self._special_pattern.sub(lambda found: "".join(char + guard for char in found[0]), text)

    def _plain_tokenizer(self) -> tokenizers.Tokenizer:
        with self._lock:
            if self._plain is None:
                self._plain = _load(self._json, "tokenizer.json")
                self._plain.encode_special_tokens = True
            return self._plain

    def _ids(self, tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _with_bos(self, ids: list[int]) -> list[int]:
        if self.bos_id is None or (ids and ids[0] == self.bos_id):
            return ids
        return [self.bos_id, *ids]


def _load(text: str, where: str) -> tokenizers.Tokenizer:
    try:
        loaded = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises a bare Exception
        raise ArtifactError(f"is not a tokenizer: {error}", where=where, remedy="compile the model again") from error
    loaded.no_truncation()
    loaded.no_padding()
    return loaded


def _alternatives(special: dict[str, int]) -> re.Pattern[str]:
    """Matches any special token, the longest first; as a capturing group, so that `split` keeps it."""
    names = sorted((name for name in special if name), key=len, reverse=True)[:SPECIAL_LIMIT]
    return re.compile("(" + "|".join(map(re.escape, names)) + ")" if names else r"(?!)")


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError("the text is not valid Unicode", where=f"character {error.start}", remedy="send valid UTF-8") from error
