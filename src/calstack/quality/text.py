"""The text quality is measured on: the bundled one, or the user's. Named and hashed in every card."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.resources
from typing import TYPE_CHECKING

from calstack.errors import SourceError, UsageError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["WINDOW", "QualityText", "bundled_text", "token_windows"]

WINDOW = 512  # tokens, as llama-perplexity's default
_BUNDLED = "state-of-the-union-1959-1966.txt"


@dataclasses.dataclass(frozen=True, slots=True)
class QualityText:
    """A named text."""

    name: str
    text: str

    @property
    def sha256(self) -> str:
        """Of its UTF-8 bytes."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def bundled_text() -> QualityText:
    """The text that comes with the package (see quality/data/README.md)."""
    data = importlib.resources.files("calstack.quality").joinpath("data", _BUNDLED).read_text("utf-8")
    return QualityText(_BUNDLED.removesuffix(".txt"), data)


def token_windows(text: QualityText, tokenizer_json: bytes, *, most: int, bos: int | None, window: int = WINDOW) -> npt.NDArray[np.int64]:
    """Ids [windows, window] of consecutive windows without overlap, at most `most`, as llama-perplexity cuts them.

    With `bos` the text starts with it, and it stands in place of each window's first token.

    Raises:
        UsageError: when the text is shorter than two windows.
    """
    import numpy as np

    ids = [] if bos is None else [bos]
    ids += encode(tokenizer_json, text.text)
    count = min(most, len(ids) // window)
    if len(ids) < 2 * window:
        raise UsageError(f"has {len(ids)} tokens, at least {2 * window} are needed", where=text.name, remedy="give a longer text")
    windows = np.asarray(ids[: count * window], np.int64).reshape(count, window)
    if bos is not None:
        windows[:, 0] = bos
    return windows


def encode(tokenizer_json: bytes, text: str) -> list[int]:
    """Ids of a text without special tokens.

    Raises:
        SourceError: when the tokenizer cannot be read.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(tokenizer_json)
    except Exception as error:
        raise SourceError(f"is not a tokenizer: {error}", where="tokenizer.json", remedy="fetch the model anew") from error
    return list(tokenizer.encode(text, add_special_tokens=False).ids)
