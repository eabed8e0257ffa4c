"""What may enter: validity of a submission for this calbin, and the bounded queue."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from calstack.engine.options import EngineOptions
from calstack.engine.sequence import Sequence
from calstack.errors import ContextSizeError, NotInCalbin, RequestError
from calstack.runtime.facts import CalbinFacts
from calstack.wire import Submit

__all__ = ["Queue", "check_submit", "output_limit"]


def check_submit(submit: Submit, facts: CalbinFacts, *, context: int, options: EngineOptions) -> None:
    """Raise what a request that can never be served as asked must be refused with."""
    _check_features(submit, options)
    _check_ids(submit, facts.vocab)
    submit.sampling.check(facts.vocab)
    if submit.max_tokens < 1:
        raise RequestError("max_tokens must be positive", param="max_tokens")
    if len(submit.prompt) >= context:
        raise ContextSizeError(len(submit.prompt), context)


def _check_features(submit: Submit, options: EngineOptions) -> None:
    if submit.adapter != 0:
        raise NotInCalbin("this calbin has no adapter slots")
    if submit.overflow != "reject":
        raise NotInCalbin(f"overflow policy {submit.overflow!r} is not available", remedy="use 'reject'")
    if submit.grammar and not options.grammars:
        raise NotInCalbin("this engine was started without grammars")
    if submit.prompt_logprobs >= 0:
        raise NotInCalbin("log-probabilities of the prompt are not available")
    if submit.top_logprobs > options.max_top_logprobs:
        raise RequestError(f"at most {options.max_top_logprobs} top log-probabilities", param="top_logprobs")


def _check_ids(submit: Submit, vocab: int) -> None:
    if not submit.prompt:
        raise RequestError("the prompt is empty", param="prompt")
    for name, ids in (("prompt", submit.prompt), ("output", submit.output)):
        if ids and not (min(ids) >= 0 and max(ids) < vocab):
            raise RequestError("a token id is outside the vocabulary", param=name)
    if not 0 <= submit.seed < 1 << 64 or not 0 <= submit.choice < 1 << 32:
        raise RequestError("seed must be an unsigned 64-bit integer, choice not negative", param="seed")


def output_limit(submit: Submit, context: int) -> int:
    """Most output ids of a request: what it asks for, cut where prompt and output fill the context."""
    return min(submit.max_tokens, context - len(submit.prompt))


class Queue:
    """Waiting requests in order of service. Its bounds are checked by the core before a push."""

    def __init__(self) -> None:
        self._items: list[Sequence] = []
        self.tokens = 0  # prompt tokens waiting

    def push(self, seq: Sequence) -> None:
        """Insert by rank."""
        bisect.insort(self._items, seq, key=lambda s: s.rank)
        self.tokens += len(seq.submit.prompt)

    def remove(self, seq: Sequence) -> None:
        """Take a waiting request out."""
        self._items.remove(seq)
        self.tokens -= len(seq.submit.prompt)

    @property
    def head(self) -> Sequence | None:
        """Who is served next."""
        return self._items[0] if self._items else None

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._items)
