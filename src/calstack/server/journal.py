"""What is known of each accepted choice: enough to go on with it in a new engine process."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec

from calstack.wire import Finish, Submit, TokenLogprob, TokenOut

__all__ = ["CRASHES_UNTIL_ALONE", "CRASHES_UNTIL_FAILED", "Entry", "Journal", "Sink"]

CRASHES_UNTIL_ALONE = 2
CRASHES_UNTIL_FAILED = 3


class Sink(Protocol):
    """Takes what the engine gives for one choice; called on the event loop, must not block or raise."""

    def on_tokens(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> None:
        """New ids, in order; `logprobs` is empty or as long."""
        ...

    def on_prompt(self, start: int, logprobs: Sequence[TokenLogprob]) -> None:
        """Scores of the prompt's ids from `start` on; after a restart they come again."""
        ...

    def on_finish(self, finish: Finish) -> None:
        """The one end of the choice."""
        ...


@dataclasses.dataclass(slots=True, eq=False)
class Entry:
    """One accepted choice. The seed is in `submit`: drawn at admission when the request had none."""

    submit: Submit
    sink: Sink
    output: list[int] = dataclasses.field(default_factory=list)
    crashes: int = 0
    sent: bool = False
    """Given to the engine process that runs now."""

    def resumed(self) -> Submit:
        """The message that makes an engine go on after `output`."""
        alone = self.submit.alone or self.crashes >= CRASHES_UNTIL_ALONE
        return msgspec.structs.replace(self.submit, output=tuple(self.output), alone=alone)


class Journal:
    """Accepted choices that have not ended, in order of acceptance."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    def accept(self, submit: Submit, sink: Sink) -> Entry:
        """Add a choice. Its name must be new."""
        assert submit.request not in self._entries, f"choice {submit.request} exists"
        entry = self._entries[submit.request] = Entry(submit, sink)
        return entry

    def record(self, out: TokenOut) -> None:
        """Keep and pass on what one step gave for one choice. A choice that has ended already is ignored."""
        if (entry := self._entries.get(out.request)) is None:
            return
        if out.prompt_logprobs:
            entry.sink.on_prompt(out.prompt_start, out.prompt_logprobs)
        if out.ids:
            entry.output.extend(out.ids)
            entry.sink.on_tokens(out.ids, out.logprobs)
        if out.finish is not None:
            self.end(out.request, out.finish)

    def end(self, request: str, finish: Finish) -> None:
        """End a choice, exactly once."""
        if (entry := self._entries.pop(request, None)) is not None:
            entry.sink.on_finish(finish)

    def fork(self, request: str, name: str, kept: int, ids: Sequence[int]) -> Entry | None:
        """Let a choice go on under a new name after `kept` of its ids and then `ids`; None when it has ended."""
        if (entry := self._entries.pop(request, None)) is None:
            return None
        submit = msgspec.structs.replace(entry.submit, request=name)
        new = self._entries[name] = Entry(submit, entry.sink, [*entry.output[:kept], *ids], entry.crashes, entry.sent)
        return new

    def __contains__(self, request: str) -> bool:
        return request in self._entries

    def crashed(self) -> list[Entry]:
        """Count a crash of the engine process for each choice that it had; gives those that may not be tried again."""
        for entry in self._entries.values():
            entry.crashes += entry.sent
            entry.sent = False
        return [entry for entry in self if entry.crashes >= CRASHES_UNTIL_FAILED]
