"""POST /v1/completions."""

from __future__ import annotations

import codecs
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from calstack.errors import RequestError
from calstack.server.choice import Delta, TokenText
from calstack.server.constraints import constraint_of
from calstack.server.context import Context
from calstack.server.exchange import Plan
from calstack.server.generation import Generation
from calstack.server.infill import Infill
from calstack.server.model import ServedModel
from calstack.server.params import Generate, check_supported, generate_of, top_logprobs_of
from calstack.server.render import Collected, Envelope, extras_of, finite, usage_of
from calstack.server.schemas import CompletionRequest
from calstack.server.status import check_model
from calstack.text.detokenize import decode_all
from calstack.text.pieces import PieceTable
from calstack.wire import TokenLogprob

__all__ = ["CompletionRenderer", "ids_of", "prompts_of", "shown", "understand_completion"]

_DEFAULT_MAX_TOKENS = 16  # OpenAI's
Prompt = str | list[int | str]


def understand_completion(context: Context, fields: CompletionRequest, request_id: str) -> Plan:
    """Check a completion request."""
    model = context.model
    check_model(model, fields.model)
    check_supported(fields)
    generate = generate_of(fields, model.vocabulary, context.config.limits, model.defaults)
    if all(getattr(fields, name) is None for name in ("max_tokens", "max_completion_tokens", "n_predict")):
        generate = dataclasses.replace(generate, max_tokens=_DEFAULT_MAX_TOKENS)
    top = -1 if fields.logprobs is None else top_logprobs_of(fields.logprobs, context.config.limits, "logprobs")
    prompts = prompts_of(fields.prompt, model)
    echoes = [shown(prompt, model) for prompt in prompts] if fields.echo else [""] * len(prompts)
    spec = constraint_of(fields)
    renderer = CompletionRenderer(f"cmpl-{request_id}", model, generate, echoes, scored=bool(fields.echo) and top >= 0)

    write = _writer(fields, prompts, model)

    def tokenise() -> list[list[int]]:
        renderer.prompts = [write(prompt) for prompt in prompts]
        return renderer.prompts

    return Plan(
        generate=generate,
        prompts=len(prompts),
        tokenise=tokenise,
        renderer=renderer,
        top_logprobs=top,
        prompt_logprobs=top if fields.echo else -1,
        constrain=None if spec is None else lambda: model.constraints.source(spec),
    )


def _writer(fields: CompletionRequest, prompts: Sequence[Prompt], model: ServedModel) -> Callable[[Prompt], list[int]]:
    """Makes the ids of a prompt. With a suffix the answer is what comes between; only texts can have one."""
    suffix = fields.suffix
    if not suffix:
        return lambda prompt: ids_of(prompt, model)
    infill = Infill(model)
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise RequestError("a prompt of ids cannot have a suffix", where="$.suffix", param="suffix")
    if fields.echo and fields.logprobs is not None:
        raise RequestError("log-probabilities of a prompt with a suffix are not offered", where="$.echo", param="echo")
    return lambda prompt: infill.ids(str(prompt), suffix)


def prompts_of(given: str | list[str | int | list[str | int]], model: ServedModel) -> list[Prompt]:
    """The prompts: one text, one list of ids (with texts among them), or a list of either.

    Raises:
        RequestError: for an empty list, an id outside the vocabulary, or lists and ids side by side.
    """
    if isinstance(given, str):
        return [given]
    if not given:
        raise _bad("is empty")
    if any(isinstance(part, list) for part in given):
        if any(isinstance(part, int) for part in given):
            raise _bad("holds ids and lists side by side")
        prompts: list[Prompt] = [part for part in given if not isinstance(part, int)]
    elif any(isinstance(part, int) for part in given):
        prompts = [[part for part in given if not isinstance(part, list)]]
    else:
        prompts = [part for part in given if isinstance(part, str)]
    for prompt in prompts:
        if not prompt and not isinstance(prompt, str):
            raise _bad("holds an empty list")
        if any(isinstance(id_, int) and not 0 <= id_ < model.vocabulary.size for id_ in prompt):
            raise _bad(f"holds an id outside the vocabulary of {model.vocabulary.size}")
    return prompts


def ids_of(prompt: Prompt, model: ServedModel) -> list[int]:
    """Ids of a prompt. BOS comes first where the model has one; an empty text is then BOS alone."""
    tokenizer = model.tokenizer
    if isinstance(prompt, str):
        return tokenizer.encode(prompt, special=True, bos=True) or list(model.spec.bos_ids[:1])
    out: list[int] = []
    for place, part in enumerate(prompt):
        out.extend([part] if isinstance(part, int) else tokenizer.encode(part, special=True, bos=place == 0))
    return out


def shown(prompt: Prompt, model: ServedModel) -> str:
    if isinstance(prompt, str):
        return prompt
    runs = itertools.groupby(prompt, key=lambda part: isinstance(part, str))
    return "".join("".join(map(str, run)) if is_text else decode_all(model.tokenizer.pieces, map(int, run)) for is_text, run in runs)


def _bad(what: str) -> RequestError:
    return RequestError(what, where="$.prompt", param="prompt")


class CompletionRenderer:
    """Writes text answers. `echoes` holds per prompt what is given back before the answer; `scored`: with log-probabilities."""

    def __init__(self, id_: str, model: ServedModel, generate: Generate, echoes: Sequence[str], *, scored: bool) -> None:
        self._envelope = Envelope(id_, "text_completion", model.id, model.fingerprint)
        self._generate, self._pieces, self._echoes = generate, model.tokenizer.pieces, echoes
        self._begun: set[int] = set()
        self._scored = scored
        self.prompts: list[list[int]] = []
        """Ids of each prompt, once they are known."""

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._generate.choices]

    def whole(self, choices: Sequence[Collected], generation: Generation) -> dict[str, Any]:
        answer = self._envelope.around([self._choice(choice) for choice in choices]) | {"usage": usage_of(generation)}
        if choices[0].end is not None:
            answer |= extras_of(choices[0].end, self._generate)
        return answer

    def _choice(self, choice: Collected) -> dict[str, Any]:
        assert choice.end is not None
        echo = self._echo(choice.index)
        logprobs = self._logprobs(choice.index, choice.tokens, choice.prompt if self._scored else None)
        return {"index": choice.index, "text": echo + choice.text, "logprobs": logprobs, "finish_reason": choice.end.reason}

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        echo = self._echo(delta.index)
        text, out, prompt = delta.text, [], None
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            text, prompt = echo + text, delta.prompt if self._scored else None
        if text or delta.tokens:
            logprobs = self._logprobs(delta.index, delta.tokens, prompt)
            out.append(self._piece(delta.index, text, logprobs, None))
        if delta.end is not None:
            out.append(self._piece(delta.index, "", None, delta.end.reason) | extras_of(delta.end, self._generate))
        return out

    def _logprobs(self, index: int, tokens: Sequence[TokenText], prompt: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        """Of `tokens`, behind those of the echoed prompt where `prompt` holds its scores."""
        echo = self._echo(index)
        found = legacy_logprobs(tokens, self._pieces, len(echo)) if tokens else None
        if prompt is None:
            return found
        before = echoed_logprobs(self.prompts[index // self._generate.choices], prompt, self._pieces, len(echo))
        return {name: before[name] + (found[name] if found else []) for name in before}

    def _piece(self, index: int, text: str, logprobs: dict[str, Any] | None, finish: str | None) -> dict[str, Any]:
        return self._envelope.around([{"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}])

    def tail(self, generation: Generation) -> list[dict[str, Any]]:
        return [self._envelope.around([]) | {"usage": usage_of(generation)}] if self._generate.include_usage else []


def legacy_logprobs(tokens: Sequence[TokenText], pieces: PieceTable, offset: int) -> dict[str, Any]:
    """OpenAI's first shape: parallel lists; text offsets in characters from the start of the echo."""
    return {
        "tokens": [token_text(pieces, token.id) for token in tokens],
        "token_logprobs": [finite(token.logprob.logprob) for token in tokens],
        "top_logprobs": [_tops(pieces, token) for token in tokens],
        "text_offset": [offset + token.start for token in tokens],
    }


def echoed_logprobs(ids: Sequence[int], scores: Sequence[TokenLogprob], pieces: PieceTable, length: int) -> dict[str, Any]:
    """The same of a prompt whose text has `length` characters; nothing predicts its first id. A BOS or first space that the text lacks
    has no width."""
    texts = [TokenText(id_, 0, score) for id_, score in zip(ids[1:], scores, strict=True)]
    found = legacy_logprobs(texts, pieces, 0)
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    widths = [len(decode(pieces.bytes_of(id_))) for id_ in ids]
    hidden = max(0, sum(widths) - length)
    starts = [max(0, start) for start in itertools.accumulate(widths[:-1], initial=-hidden)]
    return {
        "tokens": [token_text(pieces, ids[0]), *found["tokens"]],
        "token_logprobs": [None, *found["token_logprobs"]],
        "top_logprobs": [None, *found["top_logprobs"]],
        "text_offset": starts,
    }


def _tops(pieces: PieceTable, token: TokenText) -> dict[str, float]:
    """Two ids may share a text; the likelier one stays. The sampled token is always among them, as OpenAI does."""
    found: dict[str, float] = {}
    for id_, logprob in zip(token.logprob.top_ids, token.logprob.top_logprobs, strict=True):
        found.setdefault(token_text(pieces, id_), finite(logprob))
    found.setdefault(token_text(pieces, token.id), finite(token.logprob.logprob))
    return found


def token_text(pieces: PieceTable, id_: int) -> str:
    data = pieces.bytes_of(id_)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
