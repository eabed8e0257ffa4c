"""Which lanes make the next launch, and on which submodel: pure functions over the calbin's constraints, read as data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from calstack.runtime.facts import CalbinFacts, Extent, SubmodelFacts
from calstack.specs import Role

__all__ = ["Choice", "Planner"]


class Choice(NamedTuple):
    """A launch to make: the submodel, and per chosen candidate its index and the tokens it adds."""

    submodel: SubmodelFacts
    lanes: tuple[tuple[int, int], ...]  # (index into the candidates, tokens)


class Planner:
    """Never chooses what the constraints forbid; always chooses something when a candidate can be served alone."""

    def __init__(self, facts: CalbinFacts) -> None:
        self._decode = facts.of_role(Role.DECODE)
        self._prefill = facts.of_role(Role.PREFILL)
        self._extend = facts.of_role(Role.EXTEND)
        self._most = facts.max_tokens_per_launch

    @property
    def most_guesses(self) -> int:
        """Guesses that a launch can check behind one id; 0 = the calbin has no submodel for it."""
        return max((sub.q_len - 1 for sub in self._extend), default=0)

    def extend(self, lanes: Sequence[Extent]) -> SubmodelFacts | None:
        """The smallest submodel that samples after every one of these rows."""
        return self._smallest(self._extend, lanes)

    def decode(self, pasts: Sequence[int]) -> Choice | None:
        """One token for as many candidates as one launch can take, preferring earlier ones. `pasts`: their KV lengths."""
        lanes = [Extent(past, 1) for past in pasts]
        whole = self._smallest(self._decode, lanes)
        if whole is not None:
            return Choice(whole, tuple((i, 1) for i in range(len(lanes))))
        lanes, picked = [], []
        for i, past in enumerate(pasts):
            trial = [*lanes, Extent(past, 1)]
            if self._smallest(self._decode, trial) is not None:
                lanes = trial
                picked.append((i, 1))
        return self._choice(self._decode, lanes, picked)

    def prefill(self, wants: Sequence[Extent], budget: int) -> Choice | None:
        """Prompt tokens for candidates in order: `cur` is what each wants at most, `budget` what the launch may hold."""
        lanes: list[Extent] = []
        picked: list[tuple[int, int]] = []
        left = min(max(budget, 1), self._most)
        for i, want in enumerate(wants):
            if left < 1:
                break
            count = self._most_tokens(lanes, Extent(want.past, min(want.cur, left)))
            if count > 0:
                lanes.append(Extent(want.past, count))
                picked.append((i, count))
                left -= count
        return self._choice(self._prefill, lanes, picked)

    def _choice(self, subs: Sequence[SubmodelFacts], lanes: Sequence[Extent], picked: Sequence[tuple[int, int]]) -> Choice | None:
        sub = self._smallest(subs, lanes) if lanes else None
        return Choice(sub, tuple(picked)) if sub else None

    def _smallest(self, subs: Sequence[SubmodelFacts], lanes: Sequence[Extent]) -> SubmodelFacts | None:
        if sum(lane.cur for lane in lanes) > self._most:
            return None
        return next((sub for sub in subs if sub.fits(lanes)), None)

    def _most_tokens(self, lanes: Sequence[Extent], want: Extent) -> int:
        """Most tokens (at most want.cur) that some prefill submodel takes for one more lane beside `lanes`."""
        used = sum(lane.cur for lane in lanes)
        best = 0
        for sub in self._prefill:
            count = min(want.cur, sub.q_len, sub.rows - used, sub.context - want.past)
            if count > best and sub.fits([*lanes, Extent(want.past, count)]):
                best = count
        return best
