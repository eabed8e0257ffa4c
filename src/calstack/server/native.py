"""POST /completion and /infill: llama-server's own generating routes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from calstack.server.choice import Delta, End, TokenText
from calstack.server.completions import ids_of, prompts_of, shown
from calstack.server.constraints import constraint_of
from calstack.server.context import Context
from calstack.server.exchange import Plan
from calstack.server.generation import Generation
from calstack.server.infill import Infill
from calstack.server.model import ServedModel
from calstack.server.params import Generate, check_supported, generate_of, top_logprobs_of
from calstack.server.render import Collected, chat_logprobs, overflow_of, timings_of
from calstack.server.schemas import InfillRequest, NativePrompt, NativeRequest
from calstack.server.status import check_model
from calstack.text.pieces import PieceTable

__all__ = ["NativeRenderer", "settings_of", "understand_infill", "understand_native"]


def understand_native(context: Context, fields: NativeRequest, _request_id: str) -> Plan:
    """Check a /completion request."""
    model = context.model
    given = fields.prompt.prompt_string if isinstance(fields.prompt, NativePrompt) else fields.prompt
    prompts = prompts_of(given, model)
    return _plan(
        context, fields, [shown(prompt, model) for prompt in prompts], lambda: [ids_of(prompt, model) for prompt in prompts]
    )  # fmt: skip


def understand_infill(context: Context, fields: InfillRequest, _request_id: str) -> Plan:
    """Check an /infill request.

    Raises:
        NotInCalbin: when the model was not made to fill in.
    """
    infill = Infill(context.model)
    prefix = fields.input_prefix + (fields.prompt or "")
    return _plan(context, fields, [fields.input_prefix], lambda: [infill.ids(prefix, fields.input_suffix, fields.input_extra or ())])


def _plan(context: Context, fields: NativeRequest | InfillRequest, shown_: list[str], tokenise: Callable[[], list[list[int]]]) -> Plan:
    model = context.model
    check_model(model, fields.model)
    check_supported(fields)
    generate = generate_of(fields, model.vocabulary, context.config.limits, model.defaults)
    probs = top_logprobs_of(fields.n_probs, context.config.limits, "n_probs")
    spec = constraint_of(fields)
    return Plan(
        generate=generate,
        prompts=len(shown_),
        tokenise=tokenise,
        renderer=NativeRenderer(model, generate, fields, shown_),
        top_logprobs=probs if probs or fields.return_tokens else -1,
        constrain=None if spec is None else lambda: model.constraints.source(spec),
        done=b"",
    )


class NativeRenderer:
    """Writes llama-server's answers. `prompts` are given back as they read."""

    def __init__(self, model: ServedModel, generate: Generate, fields: NativeRequest | InfillRequest, prompts: Sequence[str]) -> None:
        self._model, self._generate, self._fields, self._prompts = model, generate, fields, prompts
        self._pieces: PieceTable = model.tokenizer.pieces
        self._decoded: dict[int, int] = {}
        self._lines: set[int] = set()

    def whole(self, choices: Sequence[Collected], generation: Generation) -> Any:
        answers = [self._final(choice, generation) for choice in choices]
        return answers[0] if len(answers) == 1 else answers

    def _final(self, choice: Collected, generation: Generation) -> dict[str, Any]:
        assert choice.end is not None
        answer = self._end(choice.index, choice.end, choice.text, "\n" in choice.text)
        if self._fields.return_tokens:
            answer["tokens"] = [token.id for token in choice.tokens]
        if self._fields.n_probs:
            answer["completion_probabilities"] = self._probabilities(choice.tokens)
        return self._wanted(answer)

    def _end(self, index: int, end: End, text: str, new_line: bool) -> dict[str, Any]:
        usage = end.usage
        prompt = usage.prompt_tokens if usage else 0
        return {
            "index": index,
            "content": text,
            "tokens": [],
            "id_slot": index,
            "stop": True,
            "model": self._model.id,
            "tokens_predicted": end.completion_tokens,
            "tokens_evaluated": prompt,
            "generation_settings": settings_of(self._generate),
            "prompt": self._prompts[index // self._generate.choices],
            "has_new_line": new_line,
            "truncated": usage is not None and usage.cut + usage.shifts > 0,
            "stop_type": _stop_type(end),
            "stopping_word": end.stop_string or "",
            "tokens_cached": prompt + end.completion_tokens,
            "timings": timings_of(end),
        } | overflow_of(end, self._generate)

    def _wanted(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Only the fields asked for; a path with slashes becomes one key."""
        paths = self._fields.response_fields
        if not paths:
            return answer
        found = ((path, _at(answer, path.split("/"))) for path in paths)
        return {path: value for path, value in found if value is not _ABSENT}

    def _probabilities(self, tokens: Sequence[TokenText]) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = chat_logprobs(tokens, self._pieces)["content"]
        return [_as_probability(entry) for entry in entries] if self._fields.post_sampling_probs else entries

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        out = []
        if delta.text or delta.tokens:
            out.append(self._piece(delta))
        if delta.end is not None:
            out.append(self._wanted(self._end(delta.index, delta.end, "", delta.index in self._lines)))
        return out

    def _piece(self, delta: Delta) -> dict[str, Any]:
        self._decoded[delta.index] = decoded = self._decoded.get(delta.index, 0) + max(1, len(delta.tokens))
        if "\n" in delta.text:
            self._lines.add(delta.index)
        tokens = [token.id for token in delta.tokens] if self._fields.return_tokens else []
        piece = {"index": delta.index, "content": delta.text, "tokens": tokens, "stop": False, "id_slot": delta.index}
        piece |= {"tokens_predicted": decoded, "tokens_evaluated": 0}
        if self._fields.n_probs and delta.tokens:
            piece["completion_probabilities"] = self._probabilities(delta.tokens)
        return piece

    def tail(self, generation: Generation) -> list[dict[str, Any]]:
        return []


_ABSENT = object()


def _at(value: Any, path: Sequence[str]) -> Any:
    for key in path:
        value = value.get(key, _ABSENT) if isinstance(value, dict) else _ABSENT
    return value


def _stop_type(end: End) -> str:
    if end.stop_string is not None:
        return "word"
    return "eos" if end.reason == "stop" else "limit"


def _as_probability(entry: dict[str, Any]) -> dict[str, Any]:
    top = [_one_probability(other) for other in entry["top_logprobs"]]
    return {**_one_probability(entry), "top_probs": top}


def _one_probability(entry: dict[str, Any]) -> dict[str, Any]:
    return {"id": entry["id"], "token": entry["token"], "bytes": entry["bytes"], "prob": math.exp(entry["logprob"])}


def settings_of(generate: Generate) -> dict[str, Any]:
    """llama-server's generation_settings, as far as they mean something here."""
    sampling = generate.sampling
    limit = -1 if generate.max_tokens is None else generate.max_tokens
    return {
        "seed": generate.seed,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop": list(generate.stops),
        "max_tokens": limit,
        "n_predict": limit,
        "ignore_eos": generate.ignore_eos,
        "stream": generate.stream,
        "logit_bias": [{"token": one.token, "bias": one.bias if math.isfinite(one.bias) else None} for one in sampling.logit_bias],
    }
