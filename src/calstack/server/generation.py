"""The choices of one request, from admission to their ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Self

from calstack.errors import CancelledError, RequestError
from calstack.server.accounts import Account
from calstack.server.admission import Place
from calstack.server.choice import Choice, Delta, End
from calstack.server.context import Context
from calstack.server.params import Generate, fit_prompt
from calstack.server.traces import ChoiceTrace
from calstack.text.thoughts import ThoughtMeter
from calstack.wire import Submit

__all__ = ["Generation", "PromptSpec"]


class PromptSpec:
    """One prompt as the engine gets it, and the places reserved for its choices. `cut`: ids dropped to make it fit."""

    __slots__ = ("cut", "ids", "keep", "limit", "places")

    def __init__(self, ids: Sequence[int], limit: int, places: list[Place], *, keep: int = 0, cut: int = 0) -> None:
        self.ids, self.limit, self.places, self.keep, self.cut = tuple(ids), limit, places, keep, cut


class Generation:
    """Runs n choices of each prompt; their numbers count through prompts first, then choices.

    Use as a context manager: leaving it cancels what has not ended, so that an error or a client that left frees its lanes.
    """

    def __init__(
        self,
        context: Context,
        request_id: str,
        generate: Generate,
        *,
        arrival: float,
        top_logprobs: int = -1,
        account: Account | None = None,
    ) -> None:
        self._context, self._request_id, self._generate = context, request_id, generate
        self._arrival, self._top_logprobs = arrival, top_logprobs
        self._account, self._hold = account, None if account is None else account.begin()
        self.grammar = ""
        """What every answer must match (see Submit.grammar)."""
        self.meter: Callable[[int], ThoughtMeter | None] = lambda _: None
        """Makes what counts the thought of one answer of so many tokens."""
        self.close_thought: Callable[[], list[int]] = list
        """Gives the ids that end a thought."""
        self.prompt_logprobs = -1
        """Likeliest ids to give beside each prompt id's score; -1 = no scores."""
        self._renamed: dict[int, str] = {}
        self._places: list[Place] = []
        self._prompts: list[PromptSpec] = []
        self._choices: list[Choice] = []
        self._pending: list[Delta] = []
        self._told: dict[int, float] = {}  # when a choice gave something last
        self.ends: dict[int, End] = {}
        self.traces: list[ChoiceTrace] = []
        self._gone = False
        self._waiter: asyncio.Future[None] | None = None
        self._last = arrival
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.cancel()
        if self.ends:
            self._context.metrics.request_ended(max(end.completion_tokens for end in self.ends.values()))
        started = {id(place) for prompt in self._prompts for place in prompt.places} if self._choices else set()
        for place in self._places:  # those whose choice was never given to the engine; the others are released at its end
            if id(place) not in started:
                self._context.admission.release(place)
        if self._hold is not None:
            self._hold.end(sum(len(prompt.ids) for prompt in self._prompts) + sum(end.completion_tokens for end in self.ends.values()))

    # --- before the engine ------------------------------------------------------------------------------------------------------

    def reserve(self, prompts: int) -> None:
        """Take places in the queue, before any costly work.

        Raises:
            RequestError: when there are more choices than a request may have.
            OverloadedError: when the queue is full.
        """
        count = prompts * self._generate.choices
        if count > (most := self._context.config.limits.max_choices):
            raise RequestError(f"asks for {count} choices, {most} may be", where="$.n", param="n")
        self._places = self._context.admission.reserve(count)

    def add_prompts(self, prompts: Sequence[Sequence[int]], context_size: int) -> None:
        """Set the token ids of every prompt.

        Raises:
            RequestError: for an empty prompt.
            ContextSizeError: for one that is too long.
            OverloadedError: when too many prompt tokens wait.
        """
        for number, ids in enumerate(prompts):
            if not ids:
                raise RequestError("the prompt is empty", where="$.prompt", param="prompt")
            fitted, limit, keep = fit_prompt(ids, self._generate, context_size)
            n = self._generate.choices
            places = self._places[number * n : (number + 1) * n]
            if self._hold is not None:
                self._hold.take(len(fitted) + n * limit)
            self._context.admission.hold_tokens(places, len(fitted))
            self._prompts.append(PromptSpec(fitted, limit, places, keep=keep, cut=len(ids) - len(fitted)))

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(len(prompt.ids) for prompt in self._prompts)

    @property
    def count(self) -> int:
        """Number of choices."""
        return len(self._prompts) * self._generate.choices

    def summary(self) -> dict[str, object]:
        """Counts for the log."""
        return {
            "choices": self.count,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": sum(end.completion_tokens for end in self.ends.values()),
            "finish": sorted({end.reason or ("cancelled" if end.cancelled else "error") for end in self.ends.values()}),
        }

    def cached_tokens(self) -> int:
        """Prompt tokens that were in the prefix cache, each prompt counted once."""
        firsts = (self.ends.get(number * self._generate.choices) for number in range(len(self._prompts)))
        return sum(end.usage.cached_tokens for end in firsts if end is not None and end.usage is not None)

    # --- with the engine --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Give every choice to the engine.

        Raises:
            CancelledError: when the client has left meanwhile.
        """
        if self._gone:
            raise CancelledError("the client left")
        self._context.metrics.asked(choices=self._generate.choices, max_tokens=max(prompt.limit for prompt in self._prompts))
        for number, prompt in enumerate(self._prompts):
            for draw, place in enumerate(prompt.places):
                self._start_one(number * self._generate.choices + draw, draw, prompt, place)

    async def deltas(self, silence_s: float) -> AsyncIterator[list[Delta]]:
        """What arrives, in batches, until every choice has ended; an empty batch after `silence_s` of nothing.

        Raises:
            CancelledError: when the client has left.
        """
        open_choices = self.count
        timer = asyncio.get_running_loop().call_later(silence_s, self._quiet, silence_s)
        try:
            while open_choices:
                if not (self._pending or self._gone):
                    await self._wait()
                if self._gone:
                    raise CancelledError("the client left")
                batch, self._pending = self._pending, []
                open_choices -= sum(delta.end is not None for delta in batch)
                yield batch
        finally:
            (self._timer or timer).cancel()

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        self._last = time.monotonic()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _quiet(self, silence_s: float) -> None:
        """Wake the reader when nothing came for `silence_s`; the timer is set once per silence, not per token."""
        left = self._last + silence_s - time.monotonic()
        if left <= 0:
            self._wake()
        self._timer = asyncio.get_running_loop().call_later(left if left > 0 else silence_s, self._quiet, silence_s)

    def client_left(self) -> None:
        """Stop as soon as possible: nobody reads any more."""
        self._gone = True
        self.cancel()
        self._wake()

    def cancel(self) -> None:
        """Give up on what has not ended."""
        for choice in self._choices:
            if choice.end is None:
                self._context.supervisor.cancel(self._name(choice.index))

    def _start_one(self, index: int, draw: int, prompt: PromptSpec, place: Place) -> None:
        context, generate = self._context, self._generate
        choice = Choice(
            index,
            context.model.tokenizer.pieces,
            stops=generate.stops,
            keep_tokens=self._top_logprobs >= 0,
            emit=lambda delta: self._take(delta, prompt, place),
            on_first=lambda: self._first(place),
            on_stop=lambda: context.supervisor.cancel(self._name(index)),
            min_tokens=generate.min_tokens,
            silent=not prompt.limit,
            meter=self.meter(prompt.limit),
            on_spent=lambda: self._close_thought(choice),
        )
        self._choices.append(choice)
        if not prompt.limit and self.prompt_logprobs < 0:  # nothing to compute: the prompt alone was asked for
            choice.end = End(reason="length", completion_tokens=0)
            self._take(Delta(index, "", (), choice.end), prompt, place)
            return
        context.supervisor.submit(context.journal.accept(self._submit(index, draw, prompt), choice))

    def _submit(self, index: int, draw: int, prompt: PromptSpec) -> Submit:
        generate = self._generate
        return Submit(
            request=self._name(index),
            prompt=prompt.ids,
            max_tokens=max(1, prompt.limit),
            sampling=generate.sampling,
            seed=generate.seed,
            choice=draw,
            stop_ids=generate.stop_ids,
            ignore_eos=generate.ignore_eos,
            min_tokens=generate.min_tokens,
            top_logprobs=self._top_logprobs,
            prompt_logprobs=self.prompt_logprobs,
            priority=generate.priority,
            cache_salt=generate.cache_salt,
            cache_prompt=generate.cache_prompt,
            grammar=self.grammar,
            overflow=generate.overflow,
            keep=prompt.keep,
            cut=prompt.cut,
            key=self._account.name if self._account is not None else "",
        )

    def _close_thought(self, choice: Choice) -> None:
        """The thought has used its budget: the engine goes on after the ids that end it, as if they had been sampled."""
        old, ids = self._name(choice.index), self.close_thought()
        self._renamed[choice.index] = f"{old}+"
        self._context.supervisor.replace(old, self._name(choice.index), choice.count, ids)
        choice.force(ids)

    def _name(self, index: int) -> str:
        return self._renamed.get(index) or f"{self._request_id}#{index}"

    def _first(self, place: Place) -> None:
        self._context.admission.started(place)
        self._context.metrics.first_token(time.monotonic() - self._arrival)

    def _take(self, delta: Delta, prompt: PromptSpec, place: Place) -> None:
        if delta.end is not None:
            self._ended(delta.index, delta.end, prompt, place)
            self.ends[delta.index] = delta.end
        self._pending.append(delta)
        self._wake()
        if (last := self._told.get(delta.index)) is not None and delta.text:
            self._context.metrics.next_text(self._last - last)
        self._told[delta.index] = self._last

    def _ended(self, index: int, end: End, prompt: PromptSpec, place: Place) -> None:
        usage = end.usage
        reason = end.reason or ("cancelled" if end.cancelled else "error")
        self.traces.append(ChoiceTrace(index, reason, end.completion_tokens, usage, time.time_ns()))
        self._context.admission.release(place, (usage.prefill_ms + usage.decode_ms) / 1e3 if usage else None)
        self._context.metrics.ended(
            reason,
            prompt=len(prompt.ids),
            output=end.completion_tokens,
            usage=usage,
            seconds=time.monotonic() - self._arrival,
        )
