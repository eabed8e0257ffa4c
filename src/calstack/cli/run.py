"""`calstack run`: one answer, or a chat, with the engine in this process."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from calstack.cli.params import CALBIN, Bytes, device_options, json_option
from calstack.errors import UsageError

if TYPE_CHECKING:
    from calstack.llm import LLM
    from calstack.specs import SamplingParams
    from calstack.wire import Finish

__all__ = ["run"]


@click.command(epilog="Example: calstack run m.calbin 'What is the capital of France?' --temperature 0")
@click.argument("calbin", type=CALBIN)
@click.argument("prompt", required=False)
@click.option("--system", help="System message.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without the chat template.")
@click.option("-n", "--max-tokens", type=click.IntRange(1), default=512, show_default=True, help="Most tokens of an answer.")
@click.option("--temperature", type=float, help="0 is greedy.  [default: the model's]")
@click.option("--top-k", type=int, help="Keep the K most likely tokens; 0 = all.  [default: the model's]")
@click.option("--top-p", type=float, help="Keep the most likely tokens up to this mass.  [default: the model's]")
@click.option("--min-p", type=float, help="Drop tokens below this share of the likeliest.  [default: the model's]")
@click.option("--repetition-penalty", type=float, help="1 = none.  [default: the model's]")
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), help="Makes draws repeat.  [default: random]")
@click.option("--kv-memory", type=Bytes(), default=0, help="Bytes for the KV cache.  [default: one lane at full context]")
@device_options
@json_option
def run(calbin: Path, prompt: str | None, as_json: bool, device: str, isa: str, threads: int, kv_memory: int, **choices: Any) -> None:
    """Answer PROMPT with CALBIN; chat when there is none. A prompt may also come through a pipe.

    At the end, a line on stderr gives prefill and decode speed and where the time went.
    """
    from calstack import api
    from calstack.devices.base import OpenOptions
    from calstack.engine.options import EngineOptions

    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read()
    if as_json and prompt is None:
        raise UsageError("--json answers one prompt", remedy="give the prompt as an argument or through a pipe")
    options = EngineOptions(max_lanes=1)
    with api.load(calbin, device=device, open_options=OpenOptions(threads=threads, isa=isa), options=options, kv_memory=kv_memory) as llm:
        session = _Session(llm, **choices)
        if prompt is None:
            _chat(session)
        elif as_json:
            click.echo(json.dumps(session.whole(prompt)))
            return
        else:
            session.show(prompt)
        click.echo(llm.summary().line(), err=True)


class _Session:
    """A conversation: earlier turns are part of the next prompt (its prefix comes from the KV cache)."""

    def __init__(self, llm: LLM, *, system: str | None, raw: bool, max_tokens: int, seed: int | None, **sampling: Any) -> None:
        self._llm, self._raw, self._max_tokens, self._seed = llm, raw, max_tokens, seed
        self._sampling = _sampling(llm, sampling)
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        self.finish: Finish | None = None

    def show(self, prompt: str) -> None:
        """Stream the answer to stdout."""
        for text in self.answer(prompt):
            sys.stdout.write(text)
            sys.stdout.flush()
        sys.stdout.write("\n")

    def whole(self, prompt: str) -> dict[str, Any]:
        """The answer with its counts and speeds."""
        text = "".join(self.answer(prompt))
        summary, finish = self._llm.summary(), self.finish
        usage = finish.usage if finish else None
        return {
            "text": text,
            "finish_reason": finish.reason if finish else None,
            "prompt_tokens": usage.prompt_tokens if usage else None,
            "output_tokens": usage.output_tokens if usage else None,
            "prefill_tok_s": summary.prefill.tok_s,
            "decode_tok_s": summary.decode.tok_s,
            "times_s": dict(summary.times_s),
        }

    def answer(self, prompt: str) -> Iterator[str]:
        """Pieces of the answer; afterwards it is part of the conversation."""
        self._messages.append({"role": "user", "content": prompt})
        ids = self._llm.encode(prompt) if self._raw else self._llm.chat_ids(self._messages)
        pieces: list[str] = []
        try:
            for event in self._llm.generate(ids, sampling=self._sampling, max_tokens=self._max_tokens, seed=self._seed):
                self.finish = event.finish
                pieces.append(event.text)
                yield event.text
        finally:
            self._messages.append({"role": "assistant", "content": "".join(pieces)})


def _sampling(llm: LLM, given: dict[str, Any]) -> SamplingParams:
    """What the command line says, else what the model's authors say."""
    from calstack.specs import SamplingParams

    defaults = llm.model.defaults
    values = {name: getattr(defaults, name) if value is None else value for name, value in given.items()}
    params = SamplingParams(**{name: value for name, value in values.items() if value is not None})
    params.check(llm.model.spec.vocab)
    return params


def _chat(session: _Session) -> None:
    """Ask until the input ends. Ctrl-C stops an answer; at the prompt it ends the chat, as Ctrl-D does."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() history and editing

    click.echo("Ctrl-D ends, Ctrl-C stops an answer.", err=True)
    while True:
        try:
            prompt = input(">>> ")
        except (EOFError, KeyboardInterrupt):
            click.echo("", err=True)
            return
        if not prompt.strip():
            continue
        try:
            session.show(prompt)
        except KeyboardInterrupt:
            click.echo("", err=True)
