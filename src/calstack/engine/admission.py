"""What may enter: validity of a submission for this calbin, and the bounded queue."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from calstack.engine.options import EngineOptions
from calstack.engine.sequence import Sequence
from calstack.errors import ContextSizeError, NotInCalbin, RequestError
from calstack.runtime.facts import CalbinFacts
from calstack.window import Window
from calstack.wire import Submit

__all__ = ["Queue", "check_submit", "output_limit"]

_MOST_KEYS = 1024  # remembered; beyond, those that are owed nothing are forgotten


def check_submit(submit: Submit, facts: CalbinFacts, *, context: int, options: EngineOptions) -> None:
    """Raise what a request that can never be served as asked must be refused with."""
    _check_features(submit, options)
    _check_ids(submit, facts.vocab)
    submit.sampling.check(facts.vocab)
    if submit.max_tokens < 1:
        raise RequestError("max_tokens must be positive", param="max_tokens")
    if len(submit.prompt) >= context:
        raise ContextSizeError(len(submit.prompt), context)
    if submit.overflow == "shift":
        Window.of(context, submit.keep, len(submit.prompt))


def _check_features(submit: Submit, options: EngineOptions) -> None:
    if submit.adapter != 0:
        raise NotInCalbin("this calbin has no adapter slots")
    if submit.overflow == "shift" and submit.prompt_logprobs >= 0:
        raise RequestError("a prompt cannot be scored where its beginning may be dropped", param="overflow")
    if submit.grammar and not options.grammars:
        raise NotInCalbin("this engine was started without grammars")
    if submit.min_tokens and submit.grammar:
        raise RequestError("min_tokens cannot go with a grammar", param="min_tokens")
    if max(submit.top_logprobs, submit.prompt_logprobs) > options.max_top_logprobs:
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
    """Most output ids of a request: what it asks for, cut where prompt and output fill the context, unless that shifts."""
    if submit.overflow == "shift":
        return submit.max_tokens
    return min(submit.max_tokens, context - len(submit.prompt))


class Queue:
    """Waiting requests in order of service. Its bounds are checked by the core before a push.

    Lower priorities first. Among equals, keys take turns by the tokens they have been given (start-time fair queueing): a key that
    has waited with nothing to do saves up no claim. Within a key, first come, first served. A request that has run before (preempted,
    restarted) has been paid for and goes ahead.
    """

    def __init__(self) -> None:
        self._groups: dict[tuple[int, str], list[Sequence]] = {}  # by priority and key, each in order of arrival; none is empty
        self._given: dict[str, float] = {}  # by key: virtual time at which its next request may start
        self._now = 0.0  # virtual start of the last request
        self._count = 0
        self.tokens = 0  # prompt tokens waiting

    def push(self, seq: Sequence) -> None:
        """Insert behind those of its key that came earlier."""
        bisect.insort(self._groups.setdefault(_group(seq), []), seq, key=lambda s: s.order)
        self.tokens += len(seq.submit.prompt)
        self._count += 1

    def remove(self, seq: Sequence) -> None:
        """Take a waiting request out."""
        group = self._groups[_group(seq)]
        group.remove(seq)
        if not group:
            del self._groups[_group(seq)]
        self.tokens -= len(seq.submit.prompt)
        self._count -= 1

    def charge(self, seq: Sequence) -> None:
        """The request starts for the first time: its key pays for what it may compute."""
        key = seq.submit.key
        self._now = self._start_of(key)
        self._given[key] = self._now + len(seq.submit.prompt) + seq.limit
        if len(self._given) > _MOST_KEYS:
            self._given = {k: v for k, v in self._given.items() if v > self._now}

    @property
    def head(self) -> Sequence | None:
        """Who is served next."""
        return min((group[0] for group in self._groups.values()), key=self._turn, default=None)

    def _turn(self, seq: Sequence) -> tuple[int, float, int]:
        start = -1.0 if seq.started_ns else self._start_of(seq.submit.key)
        return (seq.submit.priority, start, seq.order)

    def _start_of(self, key: str) -> float:
        return max(self._given.get(key, 0.0), self._now)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        return iter(sorted((seq for group in self._groups.values() for seq in group), key=lambda s: s.rank))


def _group(seq: Sequence) -> tuple[int, str]:
    return (seq.submit.priority, seq.submit.key)
