"""The state of one accepted request (one choice) inside the engine."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections import deque
from collections.abc import Sequence as Ids

import msgspec
import numpy as np

from calstack.devices.base import LaneInput, LogitRows, TokenFrom
from calstack.engine.constraints import Constraint, Mask, follow
from calstack.engine.drafts import Acceptance, Lookup
from calstack.engine.options import EngineOptions
from calstack.engine.prefix import root_key
from calstack.errors import CalstackError
from calstack.specs import DrawKey, LogitBias, SamplingParams
from calstack.window import Window
from calstack.wire import Submit, Usage

__all__ = ["Phase", "Sequence"]

PROMISING = 0.4  # share of guesses that came true from which on a request waits for more of them


class Phase(enum.Enum):
    """Where a request is. A preempted request is WAITING again."""

    PREPARING = "preparing"  # its grammar is being built
    WAITING = "waiting"
    RUNNING = "running"  # holds a lane and blocks
    ENDED = "ended"


class Sequence:
    """One request. `planned` and `done` count KV positions; every position below `planned` is in some submitted launch."""

    __slots__ = (
        "_base", "_early", "_fresh", "acceptance", "arrival_ns", "blocks", "cached", "constraint", "deadline_ns", "done", "drafting",
        "epoch", "first_token_ns", "hashed", "key", "last_plan", "limit", "lookup", "mask", "order", "output", "pending", "phase",
        "planned", "request", "restarts", "slot", "solo", "started_ns", "stops", "submit", "target", "unmasked", "window",
    )  # fmt: skip

    def __init__(self, submit: Submit, *, order: int, now_ns: int, limit: int, stops: frozenset[int], window: Window | None = None) -> None:
        self.submit, self.request, self.order, self.arrival_ns = submit, submit.request, order, now_ns
        self.deadline_ns = now_ns + submit.deadline_ms * 1_000_000 if submit.deadline_ms else 0
        self.limit = limit  # most output ids
        self.stops = stops
        self.window = window  # what the cache holds of a text longer than the context; None = it may not grow beyond
        self.output: list[int] = list(submit.output)  # known ids
        self.phase = Phase.WAITING
        self.epoch = 0  # raised when blocks are lost: ends of launches of an older epoch are discarded
        self.restarts = 0
        self.solo = submit.alone  # runs without batch mates
        self.cached = 0  # prompt positions taken from the prefix cache at the first start
        self.started_ns = self.first_token_ns = 0
        self.constraint: Constraint | None = None
        self.mask: Mask | None = None  # of the first id that is not known, when there is a constraint
        self.lookup: Lookup | None = None  # made when the first guess is wanted
        self.acceptance = Acceptance()
        self._early = _without(submit.sampling, stops) if submit.min_tokens else submit.sampling
        self._base: Ids[int] = ()  # of a text with a hole: the ids it started over from, and those since
        self._fresh: list[int] = []
        self._clear()

    def _clear(self) -> None:
        self.slot = -1
        self.blocks: list[int] = []
        self.planned = self.done = self.target = 0
        self.pending: deque[tuple[int, int]] = deque()  # (plan id, lane) of tokens in flight, oldest first
        self.key = root_key(self.submit.adapter, self.submit.cache_salt)  # chain key of the blocks named so far
        self.hashed = 0  # blocks named so far
        self.last_plan = -1
        self.drafting = False  # a launch in flight holds guesses
        self.unmasked: deque[tuple[int, int]] = deque()  # those of `pending` whose mask is still to be given

    # --- where it stands -------------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> tuple[int, int]:
        """Order of service: lower first."""
        return (self.submit.priority, self.order)

    @property
    def known(self) -> int:
        """Known ids, prompt and output."""
        return len(self.submit.prompt) + len(self.output)

    @property
    def dropped(self) -> int:
        """Known ids that have no position any more."""
        return 0 if self.window is None else self.window.dropped(self.known)

    @property
    def length(self) -> int:
        """Positions of the known ids."""
        return self.known - self.dropped

    @property
    def prefilling(self) -> bool:
        """True while known ids are not all planned."""
        return self.planned < self.target

    @property
    def to_come(self) -> int:
        """Output ids that are neither known nor in flight, before the context is full."""
        left = self.limit - len(self.output) - len(self.pending)
        return left if self.window is None else min(left, self.window.context - self.length - len(self.pending))

    @property
    def full(self) -> bool:
        """Whether the last id filled the context, so that half of it has just been dropped."""
        return self.window is not None and self.dropped > self.window.dropped(self.known - 1)

    @property
    def cacheable(self) -> bool:
        """Whether its blocks may be shared: a text with a hole in it is nobody else's beginning."""
        return self.submit.cache_prompt and not self.dropped

    @property
    def scored(self) -> bool:
        """Whether the prompt's ids are wanted with their log-probabilities."""
        return self.submit.prompt_logprobs >= 0

    def wanted(self, options: EngineOptions) -> int:
        """Positions that the next launch of known ids may take."""
        return min(self.target - self.planned, options.score_chunk if self.scored else options.prefill_chunk)

    def work(self, share: float) -> tuple[int, int]:
        """What is left: rows of known ids, and output ids when requests make `share` of what they may."""
        rows = (self.target - self.planned) if self.phase is Phase.RUNNING else self.length
        return rows, int((self.limit - len(self.output)) * share)

    def targets(self, start: int, end: int) -> Ids[int]:
        """The prompt ids that the rows at positions [start, end) predict; shorter at the prompt's end."""
        return self.submit.prompt[start + 1 : end + 1]

    @property
    def shown(self) -> tuple[Ids[int], Ids[int]]:
        """The ids by position, for the recorder: those known at the start, and the list of later ones as it grows."""
        return (self._base, self._fresh) if self.dropped else (self.submit.prompt, self.output)

    def ids(self, start: int, end: int) -> Ids[int]:
        """Known ids at positions [start, end)."""
        if gone := self.dropped:
            keep = self.window.keep if self.window is not None else 0
            return [*self._ids(min(start, keep), min(end, keep)), *self._ids(max(start, keep) + gone, max(end, keep) + gone)]
        return self._ids(start, end)

    def _ids(self, start: int, end: int) -> Ids[int]:
        """Known ids from the `start`th to before the `end`th."""
        prompt = self.submit.prompt
        split = len(prompt)
        if end <= split:
            return prompt[start:end]
        tail = self.output[max(start - split, 0) : end - split]
        return [*prompt[start:split], *tail] if start < split else tail

    # --- changes ---------------------------------------------------------------------------------------------------------------

    def start(self, slot: int, blocks: list[int], shared: int, key: bytes, cached: int, now_ns: int) -> None:
        """Take a lane and the blocks of all known ids; the first `shared` blocks (last one named `key`) hold `cached` positions."""
        self.hashed, self.key = shared, key
        self.phase, self.slot, self.blocks = Phase.RUNNING, slot, blocks
        self.target = self.length
        if self.dropped:
            self._base, self._fresh = self.ids(0, self.length), []
        self.planned = self.done = cached
        if not self.started_ns:
            self.started_ns, self.cached = now_ns, min(cached, len(self.submit.prompt))

    def stop(self, phase: Phase) -> list[int]:
        """Give lane and blocks up (returned for release) and become `phase`; launches in flight become stale."""
        blocks = self.blocks
        self._clear()
        self.epoch += 1
        self.phase = phase
        return blocks

    def take(self, plan: int, lane: int, count: int) -> LaneInput:
        """The lane input that plans the next `count` positions, and the change that goes with it."""
        known = self.planned < self.length
        emit = self.planned + count >= self.length
        tokens: Ids[int] | TokenFrom = self.ids(self.planned, self.planned + count) if known else TokenFrom(*self.pending[-1])
        lane_input = self._lane(tokens, count, emit)
        self.planned += count
        self.last_plan = plan
        if emit:
            if lane_input.late_mask:
                self.unmasked.append((plan, lane))
            self.pending.append((plan, lane))
        return lane_input

    @property
    def promising(self) -> bool:
        """Whether guesses are likely to come once the ids in flight are known: then nothing more is sent ahead."""
        if self.acceptance.share < PROMISING or self.solo:
            return False
        return bool(self._propose(1))

    def guess(self, most: int) -> list[int]:
        """Ids that may follow the known ones; none while any are in flight. All of them are sampled alike."""
        most = min(most, self.to_come - 1)
        if len(self.output) < self.submit.min_tokens:
            most = min(most, self.submit.min_tokens - len(self.output) - 1)
        return [] if self.pending or self.solo or most < 1 else self._propose(most)

    def _propose(self, most: int) -> list[int]:
        if self.constraint is not None and (forced := self.constraint.forced()):
            return forced[:most]
        if self.lookup is None:
            self.lookup = Lookup()
        self.lookup.extend(self.submit.prompt, self.output)
        return self.lookup.propose(most)

    def take_guesses(self, plan: int, lane: int, guesses: Ids[int]) -> tuple[LaneInput, tuple[int, ...]]:
        """The lane input that plans the next position and the guessed ones behind it; and the guesses that the grammar allows."""
        masks = self._masks_after(guesses)
        kept = tuple(guesses if masks is None else guesses[: len(masks)])
        if len(kept) < len(guesses):
            self.acceptance.note(len(kept) + 1, len(kept))
        if not kept:
            return self.take(plan, lane, 1), kept
        count = 1 + len(kept)
        one = self._lane((*self.ids(self.planned, self.planned + 1), *kept), count, emit=True)
        mask = None if masks is None or self.mask is None else np.stack([self.mask, *masks])
        self.planned += count
        self.pending.extend([(plan, lane)] * count)
        self.last_plan, self.drafting = plan, True
        return dataclasses.replace(one, emit_rows=count, mask=mask), kept

    def _masks_after(self, guesses: Ids[int]) -> list[Mask] | None:
        if self.constraint is None:
            return None
        try:
            return self.constraint.peek(guesses) if guesses else []
        except CalstackError:
            return []  # the request ends when it comes to that id, not before

    def settle(self) -> None:
        """The launch with guesses has ended: what came after the first wrong one was never there."""
        self.pending.clear()
        self.planned = self.done = self.length - 1
        self.drafting = False

    def _lane(self, tokens: Ids[int] | TokenFrom, count: int, emit: bool) -> LaneInput:
        blocks = tuple(self.blocks)
        s = self.submit
        logits = LogitRows.ALL if self.scored and self.targets(self.planned, self.planned + count) else LogitRows.NONE
        if not emit:
            return LaneInput(past_len=self.planned, cur_len=count, blocks=blocks, tokens=tokens, logits=logits, adapter=s.adapter)
        index = len(self.output) + len(self.pending)
        before, after = self._history() if s.sampling.needs_history else ((), ())
        return LaneInput(
            past_len=self.planned,
            cur_len=count,
            blocks=blocks,
            tokens=tokens,
            emit=True,
            sampling=self._early if index < s.min_tokens else s.sampling,
            draw=DrawKey(seed=s.seed, choice=s.choice, index=index),
            prompt_history=before,
            output_history=after,
            mask=None if self.pending else self.mask,
            late_mask=self.constraint is not None and bool(self.pending),
            top_logprobs=s.top_logprobs,
            logits=logits,
            adapter=s.adapter,
        )

    def _history(self) -> tuple[Ids[int], Ids[int]]:
        """The prompt's and the output's ids that have a position: penalties know no others."""
        prompt = self.submit.prompt
        if self.window is None or not (gone := self.dropped):
            return prompt, tuple(self.output)
        keep, rest = self.window.keep, self.window.keep + gone
        return (*prompt[:keep], *prompt[rest:]), tuple(self.output[max(0, rest - len(prompt)) :])

    def constrain(self, constraint: Constraint, mask: Mask | None) -> None:
        """The request's grammar is ready, behind the known ids."""
        self.constraint, self.mask = constraint, mask

    def learn(self, token: int) -> None:
        """A new output id is known. Raises CalstackError when the grammar does not allow it or cannot go on."""
        self.output.append(token)
        self._fresh.append(token)
        if self.constraint is not None:
            follow(self.constraint, (token,))
            self.mask = None if self.constraint.finished else self.constraint.mask()

    def usage(self, now_ns: int, extra: int = 0) -> Usage:
        """Counts and times up to now; `extra` counts a stop id, which is sampled but not delivered."""
        started = self.started_ns or now_ns
        first = self.first_token_ns or now_ns
        return Usage(
            prompt_tokens=len(self.submit.prompt),
            output_tokens=len(self.output) + extra,
            cached_tokens=self.cached,
            queue_ms=(started - self.arrival_ns) / 1e6,
            prefill_ms=(first - started) / 1e6,
            decode_ms=(now_ns - first) / 1e6,
            cut=self.submit.cut,
            shifts=0 if self.window is None else self.window.shifts(self.known),
        )


def _without(sampling: SamplingParams, ids: frozenset[int]) -> SamplingParams:
    """`sampling` that never gives one of `ids`."""
    kept = [one for one in sampling.logit_bias if one.token not in ids]
    bans = [LogitBias(token=id_, bias=-math.inf) for id_ in sorted(ids)]
    return msgspec.structs.replace(sampling, logit_bias=(*kept, *bans))
