"""One choice on its way to the client: ids become text, stop strings cut it, log-probabilities keep in step with it."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

from calstack.errors import CalstackError
from calstack.server.errors import InternalError, error_of
from calstack.text.detokenize import Detokenizer
from calstack.text.pieces import PieceTable
from calstack.text.stops import StopMatcher
from calstack.text.thoughts import ThoughtMeter
from calstack.wire import Finish, TokenLogprob, Usage

__all__ = ["Choice", "Delta", "End", "TokenText"]

FinishReason = Literal["stop", "length"]


@dataclasses.dataclass(frozen=True, slots=True)
class TokenText:
    """One output token beside the text: `start` is its first character's offset in the answer."""

    id: int
    start: int
    logprob: TokenLogprob


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a choice ended. `completion_tokens` counts every sampled id up to the end, a stop id too."""

    reason: FinishReason | None
    completion_tokens: int
    usage: Usage | None = None
    stop_string: str | None = None
    stop_id: int = -1
    error: CalstackError | None = None
    cancelled: bool = False
    reasoning_tokens: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Delta:
    """New text of a choice, with the tokens that it completes. `prompt`, in the first one: scores of the prompt's ids after the first."""

    index: int
    text: str
    tokens: tuple[TokenText, ...] = ()
    end: End | None = None
    prompt: tuple[TokenLogprob, ...] = ()


class Choice:
    """Sink of the journal for one choice; gives Deltas.

    Args:
        index: of the choice in the answer.
        pieces: bytes of token ids.
        stops: stop strings.
        keep_tokens: whether Deltas carry tokens (log-probabilities were asked for).
        emit: takes each Delta; called on the event loop.
        on_first: called once, at the first token.
        on_stop: called once when a stop string has matched and the engine should give up.
        min_tokens: tokens before which no stop string counts.
        silent: the output is dropped (the prompt's scores alone are wanted).
        meter: counts the thought; None when there can be none.
        on_spent: called once when the thought has used its budget; must call `force` with what ends it.
    """

    __slots__ = (
        "_detokenizer", "_emit", "_given", "_held", "_keep", "_meter", "_on_first", "_on_spent", "_on_stop", "_prompt", "_released",
        "_seen", "_silent", "_stops", "_unstopped", "count", "end", "index",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        pieces: PieceTable,
        *,
        stops: Sequence[str],
        keep_tokens: bool,
        emit: Callable[[Delta], None],
        on_first: Callable[[], None],
        on_stop: Callable[[], None],
        min_tokens: int = 0,
        silent: bool = False,
        meter: ThoughtMeter | None = None,
        on_spent: Callable[[], None] = lambda: None,
    ) -> None:
        self.index, self.count = index, 0
        self.end: End | None = None
        self._detokenizer, self._stops = Detokenizer(pieces), StopMatcher(stops)
        self._keep, self._emit, self._on_first, self._on_stop = keep_tokens, emit, on_first, on_stop
        self._meter, self._on_spent = meter, on_spent
        self._held: deque[tuple[int, TokenText]] = deque()  # (characters that must be out first, token)
        self._unstopped, self._silent = min_tokens, silent
        self._prompt: list[TokenLogprob] = []
        self._given = False
        self._seen = self._released = 0  # characters that came, and that went out

    def on_prompt(self, start: int, logprobs: Sequence[TokenLogprob]) -> None:
        """A restart after the first token gives them again."""
        if not self._given:
            self._prompt.extend(logprobs[len(self._prompt) + 1 - start :])

    def on_tokens(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> None:
        if self._silent or self._is_stopped():
            return
        if not self.count:
            self._on_first()
        self._take(ids, logprobs)
        if self._meter is not None and self._meter.spent and not self._is_stopped():
            self._meter.close()
            self._on_spent()

    def force(self, ids: Sequence[int]) -> None:
        """Take ids that were not sampled."""
        self._take(ids, ())

    def _take(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> None:
        out = []
        for place, id_ in enumerate(ids):
            self.count += 1
            text = self._detokenizer.push(id_)
            if self._keep:
                self._hold(id_, text, logprobs[place] if logprobs else TokenLogprob(logprob=0.0))
            if went := text if self.count <= self._unstopped else self._stops.push(text):
                out.append(went)
            if self._meter is not None:
                self._meter.push(text)
            if self._is_stopped() or (self._meter is not None and self._meter.spent):
                break
        self._give("".join(out), None)
        if self._is_stopped():
            self._on_stop()

    def on_finish(self, finish: Finish) -> None:
        if self.end is not None:
            return
        thought = self._meter.tokens if self._meter is not None else 0
        self.end = dataclasses.replace(self._ending(finish), reasoning_tokens=thought)
        self._give("" if self._is_stopped() else self._stops.flush(), self.end)

    def _is_stopped(self) -> bool:
        return self._stops.matched is not None

    def _ending(self, finish: Finish) -> End:
        usage = finish.usage
        if self._is_stopped():
            return End(reason="stop", completion_tokens=self.count, usage=usage, stop_string=self._stops.matched)
        count = max(self.count, usage.output_tokens) if usage and not self._silent else self.count
        match finish.reason:
            case "stop" | "length" if self._silent:
                return End(reason="length", completion_tokens=0, usage=usage)
            case "stop" | "length":
                return End(reason=finish.reason, completion_tokens=count, usage=usage, stop_id=finish.stop_id)
            case "cancelled":
                return End(reason=None, completion_tokens=count, usage=usage, cancelled=True)
        error = error_of(finish.error) if finish.error else InternalError("the engine gave no reason")
        return End(reason=None, completion_tokens=count, usage=usage, error=error)

    def _hold(self, id_: int, text: str, logprob: TokenLogprob) -> None:
        token = TokenText(id_, self._seen, logprob)
        self._seen += len(text)
        self._held.append((self._seen + self._detokenizer.incomplete, token))

    def _give(self, text: str, end: End | None) -> None:
        self._released += len(text)
        tokens = self._release(last=end is not None) if self._keep else ()
        if text or tokens or end is not None:
            prompt = () if self._given else tuple(self._prompt)
            self._given = True
            self._emit(Delta(self.index, text, tokens, end, prompt))

    def _release(self, *, last: bool) -> tuple[TokenText, ...]:
        """Tokens whose text is out. At the end all of them, but none that begins in or after a stop string."""
        stopped = self._is_stopped()
        out = []
        while self._held and (last or stopped or self._held[0][0] <= self._released):
            token = self._held.popleft()[1]
            if not stopped or token.start < self._released:
                out.append(token)
        return tuple(out)
