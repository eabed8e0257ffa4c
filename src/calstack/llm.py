"""A calbin in this process: the engine's own core without a server, for `calstack run`, scripts and tests.

with load(path) as llm:
for event in llm.generate("The capital of France is", max_tokens=16):
print(event.text, end="")
"""

from __future__ import annotations

import dataclasses
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from calstack.devices.base import Device, LaneInput, LogitRows, OpenOptions
from calstack.devices.registry import open_device
from calstack.engine.assemble import assemble
from calstack.engine.core import Core
from calstack.engine.driver import Driver
from calstack.engine.options import EngineOptions
from calstack.errors import ArtifactError, CalstackError, ContextSizeError, OverloadedError, RequestError
from calstack.grammar import GrammarSpec, Matcher, grammar_source, load_grammars
from calstack.runtime.facts import CalbinFacts, Extent
from calstack.server.model import ServedModel, load_model
from calstack.specs import Role, SamplingParams
from calstack.text.detokenize import Detokenizer
from calstack.text.template import ChatInput
from calstack.wire import Cancel, Finish, Submit, TokenLogprob, TokenOut

__all__ = ["LLM", "Event", "PhaseSummary", "Summary", "load"]

_SLEEP_S = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """News of one generation: ids, the text that became whole with them, and at last its end."""

    ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class PhaseSummary:
    """Rows computed for requests in one phase, and what the launches took."""

    tokens: int
    seconds: float

    @property
    def tok_s(self) -> float:
        """Tokens per second of device time; 0 when nothing ran."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """Speed per phase, and the engine's wall time by label (invariant 6)."""

    prefill: PhaseSummary
    decode: PhaseSummary
    times_s: Mapping[str, float]

    def line(self) -> str:
        """One line for a terminal."""
        busy = {label: s for label, s in self.times_s.items() if label != "idle"}
        total = sum(busy.values()) or 1.0
        split = " ".join(f"{label} {s / total:.1%}" for label, s in busy.items())
        return f"prefill {self.prefill.tok_s:.1f} tok/s, decode {self.decode.tok_s:.1f} tok/s; {split}"


def load(
    calbin: Path | str,
    *,
    device: str | Device = "cpu",
    open_options: OpenOptions | None = None,
    options: EngineOptions | None = None,
    kv_memory: int = 0,
) -> LLM:
    """Load a calbin on a device, by name or already open (then the caller closes it).

    Raises:
        ArtifactError: when the calbin is damaged or does not fit the device.
        UsageError: when the device or one of its options is not known.
    """
    path = Path(calbin)
    model = load_model(path)
    if model.spec.encoder is not None:
        raise ArtifactError("is an encoder and generates nothing", where=str(path), remedy="serve it for embeddings or scores")
    opened = open_device(device, open_options) if isinstance(device, str) else device
    try:
        grammars = partial(_grammars, path)
        driver = assemble(opened, path, options=options, kv_memory=kv_memory, grammars=grammars)
    except BaseException:
        if isinstance(device, str):
            opened.close()
        raise
    return LLM(driver, model, owns_device=isinstance(device, str))


class LLM:
    """A loaded calbin. Generations may interleave (each is an iterator that drives all of them); one thread only."""

    def __init__(self, driver: Driver, model: ServedModel, *, owns_device: bool = True) -> None:
        assert isinstance(driver.core, Core), "of a decoder"
        self.driver, self.core, self.model = driver, driver.core, model
        self._owns_device = owns_device
        self._streams: dict[str, deque[TokenOut]] = {}
        self._count = 0
        self._rows = {"prefill": 0, "decode": 0}
        self._ns = {"prefill": 0.0, "decode": 0.0}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Unload the calbin, and close the device if `load` opened it."""
        self.driver.close()
        if self._owns_device:
            self.driver.runtime.device.close()

    # --- ids -------------------------------------------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, special tokens in it parsed, BOS first where the model wants one."""
        return self.model.tokenizer.encode(text, special=True, bos=True)

    def chat_ids(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Ids of a conversation, ready for the assistant's answer. Without a chat template the contents are joined by newlines."""
        if self.model.template is None:
            return self.encode("\n".join(str(message["content"]) for message in messages))
        prompt = self.model.template.render(ChatInput(messages=messages), self.model.tokenizer)
        return self.model.tokenizer.encode_prompt(prompt)

    # --- generation ------------------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        sampling: SamplingParams | None = None,
        max_tokens: int = 256,
        seed: int | None = None,
        stop_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        top_logprobs: int = -1,
        grammar: GrammarSpec | None = None,
    ) -> Iterator[Event]:
        """Events of one generation; greedy unless `sampling` says otherwise. Leaving the iterator cancels it.

        Raises (at the first `next`):
            RequestError and its like: what the engine refuses or ends the request with.
        """
        ids = tuple(self.encode(prompt) if isinstance(prompt, str) else prompt)
        submit = Submit(
            request=self._name(),
            prompt=ids,
            max_tokens=max_tokens,
            sampling=sampling or SamplingParams(temperature=0.0),
            seed=secrets.randbits(64) if seed is None else seed,
            stop_ids=(*stop_ids, *(() if ignore_eos else self.model.vocabulary.end_ids)),
            ignore_eos=ignore_eos,
            top_logprobs=top_logprobs,
            grammar=grammar_source(grammar) if grammar is not None else "",
        )
        return self.run(submit)

    def run(self, submit: Submit) -> Iterator[Event]:
        """As `generate`, for a complete submission; it enters the queue at once."""
        self._streams[submit.request] = deque()
        self._turn(submit)
        return self._events(submit.request)

    def complete(self, prompt: str | Sequence[int], **options: Any) -> tuple[list[int], str]:
        """Ids and text of a whole generation; options as for `generate`."""
        events = list(self.generate(prompt, **options))
        return [id_ for event in events for id_ in event.ids], "".join(event.text for event in events)

    def _events(self, request: str) -> Iterator[Event]:
        stream, detokenizer = self._streams[request], Detokenizer(self.model.tokenizer.pieces)
        ended = False
        try:
            while not ended:
                while not stream:
                    self._step()
                out = stream.popleft()
                ended = out.finish is not None
                if out.finish is not None and out.finish.error is not None:
                    raise _raised(out.finish)
                yield Event(out.ids, "".join(map(detokenizer.push, out.ids)), out.logprobs, out.finish)
        finally:
            del self._streams[request]
            if not ended:
                self._turn(Cancel(request=request))

    def _step(self) -> None:
        """Turn, and sleep in the device when the turn brought nothing."""
        core, before = self.core, self.core.in_flight
        if not self._turn() and (before or not core.in_flight):
            self.driver.wait(_SLEEP_S)

    def _turn(self, *messages: Submit | Cancel) -> bool:
        result = self.driver.turn(messages)
        for out in result.tokens:
            if out.request in self._streams:
                self._streams[out.request].append(out)
        for completion, times in result.ended:
            self._rows[times.phase] += times.useful_rows
            self._ns[times.phase] += completion.h2d_ns + completion.infer_ns + completion.d2h_ns
        return bool(result.tokens or result.ended)

    def _name(self) -> str:
        self._count += 1
        return f"local-{self._count}"

    # --- measures --------------------------------------------------------------------------------------------------------------

    def score(self, ids: Sequence[int], *, chunk: int = 0) -> Iterator[npt.NDArray[np.float32]]:
        """Teacher-forced logits of `ids`, in order, as arrays `[rows, vocab]` f32 whose rows add up to `len(ids)`.

        Args:
            ids: at most the context.
            chunk: most rows of an array; 0 = the largest prefill launch.

        Raises:
            OverloadedError: while generations run (the launches go past the engine's queue).
        """
        core, facts = self.core, self.core.facts
        if not core.idle:
            raise OverloadedError("scoring needs an idle engine", retry_after=1.0)
        if len(ids) > core.context:
            raise ContextSizeError(len(ids), core.context)
        blocks = core.pool.take(facts.blocks_for(len(ids)))
        if blocks is None:
            raise OverloadedError("no KV blocks are free", retry_after=1.0)
        try:
            yield from self._score(ids, blocks, chunk)
        finally:
            core.pool.release(blocks)

    def _score(self, ids: Sequence[int], blocks: list[int], chunk: int) -> Iterator[npt.NDArray[np.float32]]:
        facts, start = self.core.facts, 0
        largest = max(min(s.q_len, s.rows) for s in facts.of_role(Role.PREFILL) if s.context >= len(ids))
        size = min(chunk or largest, largest, facts.max_tokens_per_launch)
        while start < len(ids):
            part = ids[start : start + size]
            sub = next(s for s in facts.of_role(Role.PREFILL) if s.fits([Extent(start, len(part))]))
            lane = LaneInput(past_len=start, cur_len=len(part), blocks=blocks, tokens=part, logits=LogitRows.ALL)
            logits = self.driver.runtime.run_alone(sub.key, (lane,)).lanes[0].logits
            assert logits is not None
            yield logits
            start += len(part)

    def summary(self) -> Summary:
        """Since load."""
        phases = {phase: PhaseSummary(rows, self._ns[phase] / 1e9) for phase, rows in self._rows.items()}
        return Summary(phases["prefill"], phases["decode"], self.driver.ledger.seconds())


def _grammars(calbin: Path, facts: CalbinFacts) -> Callable[[str], Matcher]:
    return load_grammars(calbin, vocab=facts.vocab, eos=facts.eos_ids)


def _raised(finish: Finish) -> CalstackError:
    """The error a request ended with, as the class it had in the engine where that says something to the caller."""
    error = finish.error
    assert error is not None
    if error.kind == "OverloadedError":
        return OverloadedError(error.message, retry_after=error.retry_after)
    if error.kind in ("RequestError", "ContextSizeError"):
        return RequestError(error.message, param=error.param)
    return CalstackError(error.message)
