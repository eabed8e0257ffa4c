"""An answer as blocks that open, grow and close one after another: what Anthropic's and OpenAI's newer routes send."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

from calstack.text.output import Part

__all__ = ["Block", "BlockEvent", "BlockKind", "Blocks"]

BlockKind = Literal["content", "reasoning", "call"]


@dataclasses.dataclass(slots=True)
class Block:
    """A thought, a text, or a call (`name`; its text is the arguments)."""

    number: int
    kind: BlockKind
    name: str = ""
    text: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockEvent:
    """What happened to a block; `text` is what a growing one gained."""

    what: Literal["open", "grow", "close"]
    block: Block
    text: str = ""


class Blocks:
    """Follows the parts of one answer."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open = False

    def take(self, parts: Sequence[Part]) -> Iterator[BlockEvent]:
        """Events of new parts."""
        for part in parts:
            kind: BlockKind = "call" if part.kind == "arguments" else part.kind
            if not self._open or self.all[-1].kind != kind or part.kind == "call":
                yield from self.close()
                self.all.append(Block(len(self.all), kind, part.text if part.kind == "call" else ""))
                self._open = True
                yield BlockEvent("open", self.all[-1])
            if part.kind != "call":
                self.all[-1].text += part.text
                yield BlockEvent("grow", self.all[-1], part.text)

    def close(self) -> Iterator[BlockEvent]:
        """Close what is open."""
        if self._open:
            self._open = False
            yield BlockEvent("close", self.all[-1])
