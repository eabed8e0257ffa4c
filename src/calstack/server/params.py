"""From a request's fields to what the engine takes. Whatever cannot be kept is refused here, by name."""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from calstack.errors import ContextSizeError, NotInCalbin, RequestError, UnsupportedError
from calstack.server.config import LimitsConfig
from calstack.server.schemas import Bias, GenerationFields
from calstack.specs import LogitBias, SamplingParams
from calstack.window import Window

__all__ = ["Defaults", "Generate", "Vocabulary", "check_supported", "fit_prompt", "generate_of", "output_limit", "top_logprobs_of"]

_SEEDS = 1 << 64
_SALT_CHARS = 1024


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """Sampling where a request says nothing: the calbin's generation.json, else OpenAI's."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Vocabulary:
    """What field checks need of the model."""

    size: int
    end_ids: tuple[int, ...]
    encode: Callable[[str], list[int]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Generate:
    """One request's generation settings, checked."""

    sampling: SamplingParams
    seed: int
    choices: int
    max_tokens: int | None
    """None = as far as the context goes."""
    stops: tuple[str, ...]
    stop_ids: tuple[int, ...]
    ignore_eos: bool
    min_tokens: int
    stream: bool
    include_usage: bool
    timings: bool
    priority: int
    cache_prompt: bool
    cache_salt: str
    overflow: Literal["reject", "truncate", "shift"]
    keep: int
    """Ids at the beginning that are never dropped; -1 = the whole prompt."""


# Fields of features that are not built, with the values that ask for nothing.
_NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "prompt_logprobs": (-1,),
    "t_max_predict_ms": (0, -1),
    "return_progress": (False,),
    "typical_p": (1,),
    "top_n_sigma": (-1,),
    "mirostat": (0,),
    "dynatemp_range": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "adaptive_target": (-1,),
    "samplers": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "chat_template": (),
    "documents": ([],),
}


def check_supported(fields: GenerationFields) -> None:
    """Refuse fields whose feature is not built, unless their value asks for nothing.

    Raises:
        UnsupportedError: naming the field.
    """
    for name, neutral in _NOT_BUILT.items():
        value = getattr(fields, name, None)
        if value is not None and value not in neutral:
            raise _not_built(name)
    if fields.lora:
        raise NotInCalbin("this calbin has no adapter slots", where="$.lora", remedy="leave it out")
    if fields.repeat_last_n not in (None, -1) and (fields.repetition_penalty or fields.repeat_penalty or 1.0) != 1.0:
        raise _not_built("repeat_last_n")


def _not_built(name: str) -> UnsupportedError:
    return UnsupportedError(f"{name} is not supported yet", where=f"$.{name}", remedy="leave it out")


def generate_of(fields: GenerationFields, vocabulary: Vocabulary, limits: LimitsConfig, defaults: Defaults) -> Generate:
    """Check and convert the fields all routes share; a seed is drawn when there is none.

    Raises:
        RequestError: naming the field that is out of range.
    """
    ignore_eos = bool(fields.ignore_eos)
    _check_metadata(fields)
    return Generate(
        sampling=_sampling(fields, vocabulary, limits, defaults),
        seed=_seed(fields.seed),
        choices=_choices(fields, limits),
        max_tokens=_max_tokens(fields),
        stops=_stops(fields.stop, limits),
        stop_ids=_stop_ids(fields.stop_token_ids, vocabulary, ignore_eos=ignore_eos),
        ignore_eos=ignore_eos,
        min_tokens=_min_tokens(fields),
        stream=bool(fields.stream),
        include_usage=_include_usage(fields),
        timings=bool(fields.timings or fields.timings_per_token),
        priority=_in_range("priority", fields.priority or 0, -(1 << 31), 1 << 31),
        cache_prompt=fields.cache_prompt is not False,
        cache_salt=_salt(fields),
        overflow=_overflow(fields),
        keep=_in_range("n_keep", fields.n_keep or 0, -1, 1 << 31),
    )


def _sampling(fields: GenerationFields, vocabulary: Vocabulary, limits: LimitsConfig, defaults: Defaults) -> SamplingParams:
    top_k = _or(fields.top_k, defaults.top_k)
    penalty = fields.repetition_penalty if fields.repetition_penalty is not None else fields.repeat_penalty
    sampling = SamplingParams(
        temperature=_or(fields.temperature, defaults.temperature),
        top_k=min(0 if top_k == -1 else top_k, 1 << 31),
        top_p=_or(fields.top_p, defaults.top_p),
        min_p=_or(fields.min_p, defaults.min_p),
        repetition_penalty=_or(penalty, defaults.repetition_penalty),
        frequency_penalty=_or(fields.frequency_penalty, 0.0),
        presence_penalty=_or(fields.presence_penalty, 0.0),
        logit_bias=tuple(_biases(fields.logit_bias, vocabulary, limits)),
    )
    sampling.check(vocabulary.size)
    return sampling


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _biases(bias: Bias | None, vocabulary: Vocabulary, limits: LimitsConfig) -> Iterator[LogitBias]:
    pairs = list(bias.items() if isinstance(bias, dict) else bias or ())
    if len(pairs) > limits.max_logit_bias:
        raise _bad("logit_bias", f"has {len(pairs)} entries, {limits.max_logit_bias} may be")
    for key, value in pairs:
        if value is True:
            raise _bad("logit_bias", "a bias is a number or false")
        amount = -math.inf if value is False else float(value)
        for token in _bias_tokens(key, vocabulary):
            yield LogitBias(token=token, bias=amount)


def _bias_tokens(key: int | str, vocabulary: Vocabulary) -> list[int]:
    if isinstance(key, str):
        digits = key.removeprefix("-")
        if not (digits.isascii() and digits.isdigit()):
            return vocabulary.encode(key)
        if len(digits) > 20:
            raise _bad("logit_bias", f"token {key[:24]} is not in the vocabulary of {vocabulary.size}")
    token = int(key)
    if not 0 <= token < vocabulary.size:
        raise _bad("logit_bias", f"token {token} is not in the vocabulary of {vocabulary.size}")
    return [token]


def _seed(seed: int | None) -> int:
    if seed is None or seed == -1:
        return secrets.randbits(63)
    return _in_range("seed", seed, -(1 << 63), _SEEDS) % _SEEDS


def _choices(fields: GenerationFields, limits: LimitsConfig) -> int:
    n = fields.n if fields.n is not None else _or(fields.n_cmpl, 1)
    most = min(limits.max_choices, limits.max_queued_requests + 1)
    if not 1 <= n <= most:
        raise _bad("n", f"must be from 1 to {most}")
    if fields.best_of is not None and fields.best_of != n:
        raise _bad("best_of", "choosing the best of several is not offered")
    return n


def _max_tokens(fields: GenerationFields) -> int | None:
    for name in ("max_completion_tokens", "max_tokens", "n_predict"):
        value = getattr(fields, name)
        if value is not None:
            return None if _in_range(name, value, -1, 1 << 62) == -1 else int(value)
    return None


def _min_tokens(fields: GenerationFields) -> int:
    most = _max_tokens(fields)
    return _in_range("min_tokens", fields.min_tokens or 0, 0, (1 << 31 if most is None else most) + 1)


def _salt(fields: GenerationFields) -> str:
    """Requests share cached prefixes only when both are the same."""
    parts = (fields.cache_salt or "", fields.prompt_cache_key or "")
    for name, part in zip(("cache_salt", "prompt_cache_key"), parts, strict=True):
        if len(part) > _SALT_CHARS:
            raise _bad(name, f"is longer than {_SALT_CHARS} characters")
    return "\0".join(parts) if any(parts) else ""


def _overflow(fields: GenerationFields) -> Literal["reject", "truncate", "shift"]:
    match fields.overflow or "reject":
        case "reject" | "truncate" | "shift" as policy:
            return policy
        case _:
            raise _bad("overflow", "must be reject, truncate or shift")


def _check_metadata(fields: GenerationFields) -> None:
    """OpenAI's bounds. Nothing is stored, so that is all there is to do with it."""
    found = fields.metadata or {}
    if len(found) > 16 or any(len(key) > 64 or len(value) > 512 for key, value in found.items()):
        raise _bad("metadata", "has more than 16 entries, a key over 64 or a value over 512 characters")


def _stops(stop: str | list[str] | None, limits: LimitsConfig) -> tuple[str, ...]:
    stops = tuple(text for text in ([stop] if isinstance(stop, str) else stop or ()) if text)
    if len(stops) > limits.max_stops:
        raise _bad("stop", f"has {len(stops)} strings, {limits.max_stops} may be")
    if any(len(text) > limits.max_stop_chars for text in stops):
        raise _bad("stop", f"a string is longer than {limits.max_stop_chars} characters")
    return stops


def _stop_ids(wanted: list[int] | None, vocabulary: Vocabulary, *, ignore_eos: bool) -> tuple[int, ...]:
    if any(not 0 <= id_ < vocabulary.size for id_ in wanted or ()):
        raise _bad("stop_token_ids", f"an id is not in the vocabulary of {vocabulary.size}")
    return tuple(dict.fromkeys([*(wanted or ()), *(() if ignore_eos else vocabulary.end_ids)]))


def _include_usage(fields: GenerationFields) -> bool:
    options = fields.stream_options
    if options is None:
        return False
    if not fields.stream:
        raise _bad("stream_options", "is only for stream=true")
    if options.continuous_usage_stats:
        raise _not_built("stream_options.continuous_usage_stats")
    return bool(options.include_usage)


def top_logprobs_of(wanted: int | None, limits: LimitsConfig, param: str) -> int:
    """Alternatives to give with each token; 0 when the request names none."""
    return _in_range(param, wanted or 0, 0, limits.max_logprobs + 1)


def fit_prompt(ids: Sequence[int], generate: Generate, context: int) -> tuple[tuple[int, ...], int, int]:
    """What the engine gets of a prompt, its most output tokens, and how many ids at the beginning stay whatever happens.

    Raises:
        ContextSizeError: when the prompt is too long and may not be cut.
        RequestError: when too many ids are kept.
    """
    wanted = generate.max_tokens
    if generate.overflow == "reject":
        return tuple(ids), output_limit(len(ids), wanted, context), 0
    window = Window.of(context, generate.keep, len(ids))
    fitted = window.fit(ids, wanted)
    if generate.overflow == "shift":
        return fitted, context if wanted is None else wanted, window.keep
    return fitted, output_limit(len(fitted), wanted, context), 0


def output_limit(prompt_tokens: int, wanted: int | None, context: int) -> int:
    """Output tokens that may come after the prompt: what was asked for, at most the room left.

    Raises:
        ContextSizeError: when there is no room for any.
    """
    if prompt_tokens >= context:
        raise ContextSizeError(prompt_tokens, context)
    room = context - prompt_tokens
    return room if wanted is None else min(wanted, room)


def _in_range(param: str, value: int, low: int, end: int) -> int:
    if not low <= value < end:
        raise _bad(param, f"must be from {low} to {end - 1}")
    return value


def _bad(param: str, what: str) -> RequestError:
    return RequestError(what, where=f"$.{param}", param=param)
