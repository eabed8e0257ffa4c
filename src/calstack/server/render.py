"""The pieces OpenAI's chat and text answers share: usage, timings, log-probabilities."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, Protocol

from calstack.server.choice import Delta, End, TokenText
from calstack.server.generation import Generation
from calstack.server.params import Generate
from calstack.text.pieces import PieceTable
from calstack.wire import TokenLogprob, Usage

__all__ = ["Collected", "Envelope", "Renderer", "chat_logprobs", "extras_of", "overflow_of", "timings_of", "usage_of"]

_LOWEST = -9999.0  # stands for -inf, which JSON cannot say


@dataclasses.dataclass(frozen=True, slots=True)
class Envelope:
    """What all chunks of an answer share."""

    id: str
    object: str
    model: str
    fingerprint: str
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def around(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """An answer or chunk with these choices."""
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }


@dataclasses.dataclass(slots=True)
class Collected:
    """A whole choice."""

    index: int
    parts: list[str] = dataclasses.field(default_factory=list)
    tokens: list[TokenText] = dataclasses.field(default_factory=list)
    end: End | None = None
    prompt: tuple[TokenLogprob, ...] = ()
    """Scores of the prompt's ids after the first, where they were asked for."""

    @property
    def text(self) -> str:
        """The answer."""
        return "".join(self.parts)

    def add(self, delta: Delta) -> None:
        """Append a delta."""
        self.parts.append(delta.text)
        self.tokens.extend(delta.tokens)
        self.end = delta.end or self.end
        self.prompt = self.prompt or delta.prompt


class Renderer(Protocol):
    """How a route writes its answer."""

    def whole(self, choices: Sequence[Collected], generation: Generation) -> Any:
        """The answer in one piece."""
        ...

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """The stream events of a delta."""
        ...

    def tail(self, generation: Generation) -> list[dict[str, Any]]:
        """Events after the last delta, before [DONE]."""
        ...


def usage_of(generation: Generation) -> dict[str, Any]:
    """OpenAI's usage object, over all choices."""
    prompt = generation.prompt_tokens
    completion = sum(end.completion_tokens for end in generation.ends.values())
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": generation.cached_tokens()},
        "completion_tokens_details": {"reasoning_tokens": sum(end.reasoning_tokens for end in generation.ends.values())},
    }


def timings_of(end: End) -> dict[str, float]:
    """llama-server's timings of one choice; never null, never infinite."""
    usage = end.usage or Usage(prompt_tokens=0, output_tokens=0, cached_tokens=0, queue_ms=0.0, prefill_ms=0.0, decode_ms=0.0)
    prompt = usage.prompt_tokens - usage.cached_tokens
    return {
        "cache_n": usage.cached_tokens,
        "prompt_n": prompt,
        "prompt_ms": usage.prefill_ms,
        "prompt_per_token_ms": usage.prefill_ms / prompt if prompt else 0.0,
        "prompt_per_second": _rate(prompt, usage.prefill_ms),
        "predicted_n": end.completion_tokens,
        "predicted_ms": usage.decode_ms,
        "predicted_per_token_ms": usage.decode_ms / end.completion_tokens if end.completion_tokens else 0.0,
        "predicted_per_second": _rate(max(0, end.completion_tokens - 1), usage.decode_ms),
        "queue_ms": usage.queue_ms,
    }


def extras_of(end: End, generate: Generate) -> dict[str, Any]:
    """What an answer says beyond OpenAI's members: the times when they were asked for, and what the overflow policy did."""
    return ({"timings": timings_of(end)} if generate.timings else {}) | overflow_of(end, generate)


def overflow_of(end: End, generate: Generate) -> dict[str, Any]:
    """What a request's overflow policy did, as the member that says so; nothing where the policy is to refuse."""
    if generate.overflow == "reject" or end.usage is None:
        return {}
    return {"overflow": {"policy": generate.overflow, "prompt_tokens_dropped": end.usage.cut, "shifts": end.usage.shifts}}


def _rate(count: int, ms: float) -> float:
    return count / ms * 1e3 if ms > 0 else 0.0


def chat_logprobs(tokens: Sequence[TokenText], pieces: PieceTable) -> dict[str, Any]:
    """`logprobs` of a chat choice: one entry per token, `bytes` exact, `token` readable."""
    return {"content": [_entry(pieces, token) for token in tokens], "refusal": None}


def _entry(pieces: PieceTable, token: TokenText) -> dict[str, Any]:
    logprob = token.logprob
    top = [_one(pieces, id_, value) for id_, value in zip(logprob.top_ids, logprob.top_logprobs, strict=True)]
    return {**_one(pieces, token.id, logprob.logprob), "top_logprobs": top}


def _one(pieces: PieceTable, id_: int, logprob: float) -> dict[str, Any]:
    data = pieces.bytes_of(id_)
    return {"id": id_, "token": data.decode("utf-8", "replace"), "bytes": list(data), "logprob": finite(logprob)}


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold, at most 0."""
    return min(0.0, max(_LOWEST, logprob))
