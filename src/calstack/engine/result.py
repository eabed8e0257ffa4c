"""What one step of the core gives back, and how its parts are gathered."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from calstack.devices.base import Completion
from calstack.errors import CalstackError, NotInCalbin, OverloadedError, RequestError, UnavailableError
from calstack.runtime.plan import LateMask, LaunchPlan
from calstack.wire import Encode, Encoded, ErrorValue, Finish, LaunchTimes, Submit, TokenLogprob, TokenOut

__all__ = ["Outbox", "StepResult", "error_value", "taken"]

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """Everything a step wants done."""

    launches: tuple[LaunchPlan, ...]  # to submit, in order
    tokens: tuple[TokenOut, ...]  # to deliver
    ended: tuple[tuple[Completion, LaunchTimes], ...]  # launches that ended well in this step
    grammars: tuple[Submit, ...]  # accepted requests whose grammar must be built
    masks: tuple[LateMask, ...]  # for lanes of launches planned before
    free_blocks: tuple[int, ...]  # free KV blocks whose memory may be given back; only when the engine is idle
    wake_ns: int | None  # step again by then even without an event
    work: bool  # requests are waiting or running
    encoded: tuple[Encoded, ...] = ()  # texts that have ended, of an encoder


class Outbox:
    """Gathers the tokens of a step by request, in order of first appearance."""

    def __init__(self) -> None:
        self._ids: dict[str, list[int]] = {}
        self._logprobs: dict[str, list[TokenLogprob]] = {}
        self._ends: dict[str, Finish] = {}
        self._prompts: dict[str, tuple[int, tuple[TokenLogprob, ...]]] = {}
        self._encoded: list[Encoded] = []

    def token(self, request: str, token: int, logprob: TokenLogprob | None) -> None:
        """One more id."""
        self._ids.setdefault(request, []).append(token)
        if logprob is not None:
            self._logprobs.setdefault(request, []).append(logprob)

    def prompt(self, request: str, start: int, logprobs: tuple[TokenLogprob, ...]) -> None:
        """Scores of the prompt ids from `start` on; those of one step lie side by side."""
        first, before = self._prompts.get(request, (start, ()))
        self._ids.setdefault(request, [])
        self._prompts[request] = (first, (*before, *logprobs)) if first + len(before) == start else (start, logprobs)

    def finish(self, request: str, finish: Finish) -> None:
        """The request's one end."""
        self._ids.setdefault(request, [])
        self._ends[request] = finish

    def refuse(self, message: Encode) -> None:
        """Texts for an encoder: a decoder has no vectors of them."""
        error = NotInCalbin("the calbin is no encoder", remedy="serve an encoder's calbin")
        self._encoded.append(Encoded(request=message.request, error=error_value(error)))

    def take_encoded(self) -> tuple[Encoded, ...]:
        """Texts refused since."""
        return taken(self._encoded)

    def take(self) -> tuple[TokenOut, ...]:
        """Everything gathered, and start anew."""
        out = tuple(self._of(request, ids) for request, ids in self._ids.items())
        self.__init__()  # type: ignore[misc]
        return out

    def _of(self, request: str, ids: list[int]) -> TokenOut:
        start, prompt = self._prompts.get(request, (0, ()))
        return TokenOut(
            request=request,
            ids=tuple(ids),
            logprobs=tuple(self._logprobs.get(request, ())),
            finish=self._ends.get(request),
            prompt_start=start,
            prompt_logprobs=prompt,
        )


def error_value(error: CalstackError) -> ErrorValue:
    """An error as it crosses the wire."""
    retry = error.retry_after if isinstance(error, OverloadedError | UnavailableError) else 0.0
    param = error.param if isinstance(error, RequestError) else None
    return ErrorValue(kind=type(error).__name__, message=error.line(), param=param, retry_after=retry)


def taken(items: list[T]) -> tuple[T, ...]:
    """The items, and the list is empty."""
    found = tuple(items)
    items.clear()
    return found
