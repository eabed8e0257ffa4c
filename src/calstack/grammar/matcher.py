"""Token masks from a grammar. A matcher follows one output; masks are int32 words, bit set = token allowed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import llguidance.numpy
import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer

from calstack.errors import NotInCalbin, RequestError
from calstack.text.pieces import PieceTable

__all__ = ["Grammars", "Matcher", "load_grammars"]

Mask = npt.NDArray[np.int32]
_PLAINER = {"NoExtensionBias": "nothing can match it"}


class Matcher:
    """The state of a grammar after the tokens consumed so far."""

    def __init__(self, inner: LLMatcher, words: int) -> None:
        self._inner, self._words = inner, words

    def mask(self) -> Mask:
        """The tokens allowed next: a new array `[ceil(vocab / 32)]`; ends of sequence are allowed when the grammar may end here.

        Raises:
            RequestError: when the grammar became too costly to follow.
        """
        row = llguidance.numpy.allocate_token_bitmask(1, self._words * 32)
        llguidance.numpy.fill_next_token_bitmask(self._inner, row, 0)
        self._check()
        return np.ascontiguousarray(row[0, : self._words])

    def consume(self, token: int) -> bool:
        """Step over a token; False when the grammar does not allow it (the state is unchanged)."""
        if self._inner.validate_tokens([token]) != 1:
            return False
        self._inner.consume_token(token)
        self._check()
        return True

    def peek(self, ids: Sequence[int]) -> list[Mask]:
        """The masks after each of `ids` in turn, for as many as are allowed and leave something to follow. Nothing is consumed.

        Raises:
            RequestError: when the grammar became too costly to follow.
        """
        masks: list[Mask] = []
        taken = 0
        for token in ids:
            if not self.consume(token):
                break
            taken += 1
            if self.finished:
                break
            masks.append(self.mask())
        self.rollback(taken)
        return masks

    def rollback(self, tokens: int) -> None:
        """Take the last `tokens` consumed tokens back."""
        if tokens:
            self._inner.rollback(tokens)

    @property
    def accepting(self) -> bool:
        """True when the output may end here."""
        return bool(self._inner.is_accepting())

    @property
    def finished(self) -> bool:
        """True when nothing but an end may follow."""
        return bool(self._inner.is_stopped())

    def forced(self) -> list[int]:
        """Tokens that must come next, possibly none."""
        return list(self._inner.compute_ff_tokens())

    def _check(self) -> None:
        if self._inner.is_error():
            raise RequestError(f"the grammar cannot be followed: {_first_line(self._inner.get_error())}", param="grammar")


class Grammars:
    """Builds matchers over one tokenizer. Building costs under a second, once per process.

    Args:
        tokenizer_json: the calbin's tokenizer.json.
        vocab: rows of the logits, at least the tokenizer's size.
        eos: ids that end an output.
    """

    def __init__(self, tokenizer_json: str, *, vocab: int, eos: Sequence[int]) -> None:
        self._words = -(-vocab // 32)
        self._tokenizer = LLTokenizer(_vocabulary(tokenizer_json, vocab, eos), n_vocab=vocab, eos_token=list(eos))
        # a grammar's own cost is bounded, so that one request cannot hold the others up
        self._limits = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)

    def matcher(self, source: str, *, param: str = "grammar") -> Matcher:
        """A matcher at the start of `source` (see grammar_source).

        Raises:
            RequestError: the grammar is not supported or too large; names the keyword when there is one.
        """
        inner = LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        if inner.is_error():
            raise RequestError(f"the grammar is refused: {_first_line(inner.get_error())}", where=f"$.{param}", param=param)
        return Matcher(inner, self._words)


class _Vocabulary:
    """A tokenizer as llguidance takes it from Python."""

    def __init__(self, tokenizer: Tokenizer, tokenizer_json: str, vocab: int, eos: int) -> None:
        pieces = PieceTable(tokenizer, tokenizer_json)
        self.eos_token_id, self.bos_token_id = eos, None
        self.tokens = [pieces.bytes_of(id_) for id_ in range(vocab)]
        self.special_token_ids = sorted(pieces.special)
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def _vocabulary(tokenizer_json: str, vocab: int, eos: Sequence[int]) -> str | TokenizerWrapper:
    """The tokenizer for llguidance. It reads a tokenizer.json itself, but takes every added token in pointed brackets for a special one,
    also those that say `special: false` (`<think>`, `<tool_call>`): then it is told token by token."""
    tokenizer = Tokenizer.from_str(tokenizer_json)
    added = tokenizer.get_added_tokens_decoder().values()
    if not any(token.content.startswith("<") and token.content.endswith(">") and not token.special for token in added):
        return tokenizer_json
    return TokenizerWrapper(_Vocabulary(tokenizer, tokenizer_json, vocab, eos[0]))


def load_grammars(calbin: Path, *, vocab: int, eos: Sequence[int]) -> Callable[[str], Matcher]:
    """What turns a grammar's text into a matcher over a calbin's tokenizer.

    Raises:
        NotInCalbin: the calbin has no usable tokenizer or no end of sequence.
    """
    if not eos:
        raise NotInCalbin("no grammar can be kept: the calbin names no end of sequence", where="manifest.model.eos_ids")
    try:
        return Grammars((calbin / "tokenizer.json").read_text("utf-8"), vocab=vocab, eos=eos).matcher
    except (OSError, ValueError) as error:
        raise NotInCalbin(f"no grammar can be kept with this tokenizer: {_first_line(str(error))}", where="tokenizer.json") from error


def _first_line(message: str) -> str:
    line = message.strip().splitlines()[0][:300] if message.strip() else "unknown reason"
    return _PLAINER.get(line, line)
