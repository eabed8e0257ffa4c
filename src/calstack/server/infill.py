"""Filling in between two texts, for models with tokens for it."""

from __future__ import annotations

from collections.abc import Sequence

from calstack.errors import NotInCalbin
from calstack.server.model import ServedModel
from calstack.server.schemas import ExtraFile

__all__ = ["Infill"]

_NAMES = {
    "prefix": ("<|fim_prefix|>", "<fim_prefix>", "<PRE>", "<fim-prefix>"),
    "suffix": ("<|fim_suffix|>", "<fim_suffix>", "<SUF>", "<fim-suffix>"),
    "middle": ("<|fim_middle|>", "<fim_middle>", "<MID>", "<fim-middle>"),
}
_FILE = ("<|file_sep|>", "<file_sep>")


class Infill:
    """Writes prompts of a model.

    Raises:
        NotInCalbin: when the model was not made to fill in.
    """

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        marks = {name: model.tokenizer.special_id(*names) for name, names in _NAMES.items()}
        self._marks = {name: id_ for name, id_ in marks.items() if id_ is not None}
        if len(self._marks) < len(_NAMES):
            raise NotInCalbin("this model has no fill-in-the-middle tokens", remedy="serve a code model")

    def ids(self, prefix: str, suffix: str, extra: Sequence[ExtraFile] = ()) -> list[int]:
        """The prompt's ids; special tokens in the texts are not read."""
        tokenizer, spec = self._model.tokenizer, self._model.spec
        out = list(spec.bos_ids[:1]) if spec.add_bos else []
        separator = tokenizer.special_id(*_FILE)
        for file in extra:
            out += [] if separator is None else [separator]
            out += tokenizer.encode(f"{file.filename or 'tmp'}\n{file.text}", special=False)
        for name, text in (("prefix", prefix), ("suffix", suffix), ("middle", "")):
            out.append(self._marks[name])
            out += tokenizer.encode(text, special=False)
        return out
