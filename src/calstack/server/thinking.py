"""Whether a model may think, how long, and what of it the client sees."""

from __future__ import annotations

import dataclasses

from calstack.errors import RequestError
from calstack.server.schemas import ChatRequest
from calstack.text.output import CLOSE_THOUGHT, OPEN_THOUGHT, Thinking
from calstack.text.template import ChatInput
from calstack.text.tokenizer import PromptText

__all__ = ["Thoughts", "thoughts_of"]

_SHARE = 2  # a thought may use this part of the output tokens unless the request says otherwise
_FORMATS = (None, "auto", "deepseek", "none")


@dataclasses.dataclass(frozen=True, slots=True)
class Thoughts:
    """A request's wishes. `tokens` is the budget it names, None = the default share."""

    able: bool
    """The template knows thoughts."""
    off: bool
    separate: bool
    tokens: int | None

    def prompt(self, rendered: PromptText, given: ChatInput) -> PromptText:
        """The prompt; a thought that should not be is closed in it, where the template does not do so itself."""
        if not (self.able and self.off) or given.continue_final or not given.generation_prompt:
            return rendered
        state = self.state(rendered.text)
        if state is Thinking.OPEN:
            return dataclasses.replace(rendered, text=rendered.text.rstrip() + f"\n\n{CLOSE_THOUGHT}\n\n")
        if state is Thinking.MAYBE:
            return dataclasses.replace(rendered, text=rendered.text + f"{OPEN_THOUGHT}\n\n{CLOSE_THOUGHT}\n\n")
        return rendered

    def state(self, prompt: str) -> Thinking:
        """Where a thought may begin after this prompt."""
        if not self.able:
            return Thinking.OFF
        end = prompt.rstrip()
        if end.endswith(OPEN_THOUGHT):
            return Thinking.OPEN
        return Thinking.OFF if end.endswith(CLOSE_THOUGHT) else Thinking.MAYBE

    def budget(self, limit: int, closing: int) -> int | None:
        """Tokens a thought may have when the output may have `limit` and closing takes `closing`; None = no bound."""
        wanted = limit // _SHARE if self.tokens is None else self.tokens
        room = limit - closing - 1
        return None if self.tokens == -1 or room < 1 else max(1, min(wanted, room))


def thoughts_of(chat: ChatRequest, template: str) -> Thoughts:
    """The wishes of a request.

    Raises:
        RequestError: for a budget or format that does not exist.
    """
    if chat.reasoning_format not in _FORMATS:
        raise _bad("reasoning_format", "must be auto, deepseek or none")
    tokens = None
    for name in ("thinking_budget_tokens", "reasoning_budget_tokens", "thinking_token_budget"):
        if (value := getattr(chat, name)) is not None:
            if value < -1:
                raise _bad(name, "must be -1 (no bound) or more")
            tokens = value
    off = (chat.chat_template_kwargs or {}).get("enable_thinking") is False or chat.reasoning_effort == "none" or tokens == 0
    return Thoughts(CLOSE_THOUGHT in template, off, chat.reasoning_format != "none", tokens)


def _bad(param: str, what: str) -> RequestError:
    return RequestError(what, where=f"$.{param}", param=param)
