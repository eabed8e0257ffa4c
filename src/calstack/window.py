"""What stays of a text that outgrows the context: its head, and its newest ids."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from calstack.errors import RequestError

__all__ = ["Window"]


@dataclasses.dataclass(frozen=True, slots=True)
class Window:
    """The ids of one request that the KV cache holds, as a function of how many there are: the same in every run of the request.

    Args:
        context: most positions of a request.
        keep: ids at the beginning that are never dropped; -1 = the whole prompt (see `of`).
    """

    context: int
    keep: int = 0

    @classmethod
    def of(cls, context: int, keep: int, prompt: int) -> Window:
        """The window of a prompt of `prompt` ids that keeps `keep` of them.

        Raises:
            RequestError: when what is kept leaves less than half the context.
        """
        kept = prompt if keep < 0 else min(keep, prompt)
        if kept > context // 2:
            raise RequestError(f"keeps {kept} of {context} positions, at most half may be", where="$.n_keep", param="n_keep")
        return cls(context, kept)

    def fit(self, prompt: Sequence[int], wanted: int | None) -> tuple[int, ...]:
        """The prompt without its oldest ids behind the kept ones, so that `wanted` ids may follow, at most a quarter of the context."""
        quarter = self.context // 4
        room = max(1, quarter if wanted is None else min(wanted, quarter))
        over = max(0, len(prompt) + room - self.context)
        return (*prompt[: self.keep], *prompt[self.keep + over :])

    def dropped(self, known: int) -> int:
        """Ids behind the kept ones that have gone when `known` ids are known: half of what may go, each time the context is full."""
        step = (self.context - self.keep) // 2
        return 0 if known < self.context else step * self.shifts(known)

    def shifts(self, known: int) -> int:
        """How often the context has been full by the time that `known` ids are known."""
        step = (self.context - self.keep) // 2
        return 0 if known < self.context else 1 + (known - self.context) // step
