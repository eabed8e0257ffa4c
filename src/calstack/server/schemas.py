"""What clients may send. `null` means absent everywhere; unknown fields are ignored, wrong types are a 400 with the field's path."""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = [
    "ChatMessage",
    "ChatRequest",
    "ClassifyRequest",
    "CompletionRequest",
    "ContentPart",
    "DetokenizeRequest",
    "EmbeddingRequest",
    "GenerationFields",
    "InfillRequest",
    "NativePrompt",
    "NativeRequest",
    "RerankRequest",
    "ScoreRequest",
    "StreamOptions",
    "TextObject",
    "TokenizeRequest",
    "ToolCall",
    "ToolFunction",
]

Bias = dict[str, float | bool] | list[tuple[int | str, float | bool]]


class _Input(msgspec.Struct, kw_only=True, frozen=True):
    pass


class StreamOptions(_Input, frozen=True, kw_only=True):
    """OpenAI's stream_options."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(_Input, frozen=True, kw_only=True):
    """Fields that every generating route takes.

    Those typed Any belong to features that are not built: a value other than the neutral one is refused (`params.py`), never dropped.
    """

    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n_predict: int | None = None
    n: int | None = None
    n_cmpl: int | None = None
    best_of: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    seed: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Bias | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    timings: bool | None = None
    timings_per_token: bool | None = None
    priority: int | None = None
    cache_prompt: bool | None = None
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    overflow: str | None = None
    n_keep: int | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    response_format: Any = None
    # checked by constraints.py
    grammar: Any = None
    json_schema: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    regex: Any = None
    ebnf: Any = None
    # not built yet
    lora: Any = None
    prompt_logprobs: Any = None
    t_max_predict_ms: Any = None
    return_progress: Any = None
    repeat_last_n: Any = None
    typical_p: Any = None
    top_n_sigma: Any = None
    mirostat: Any = None
    dynatemp_range: Any = None
    dry_multiplier: Any = None
    xtc_probability: Any = None
    adaptive_target: Any = None
    samplers: Any = None


class ContentPart(_Input, frozen=True, kw_only=True):
    """A part of a message's content; only text is understood."""

    type: str
    text: str | None = None


class ToolFunction(_Input, frozen=True, kw_only=True):
    """The function of a tool call in the history."""

    name: str
    arguments: Any = None


class ToolCall(_Input, frozen=True, kw_only=True):
    """A tool call in the history."""

    function: ToolFunction
    id: str | None = None
    type: str | None = None


class ChatMessage(_Input, frozen=True, kw_only=True):
    """One message. Only an assistant's content may be missing; null is accepted in any."""

    role: str
    content: str | list[ContentPart] | msgspec.UnsetType | None = msgspec.UNSET
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ChatRequest(GenerationFields, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    reasoning_format: str | None = None
    thinking_budget_tokens: int | None = None
    reasoning_budget_tokens: int | None = None
    thinking_token_budget: int | None = None
    # not built yet
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None
    chat_template: Any = None
    documents: Any = None


class CompletionRequest(GenerationFields, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[str | int]]
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None


class NativePrompt(_Input, frozen=True, kw_only=True):
    """A prompt as llama-server's object form."""

    prompt_string: str


class NativeRequest(GenerationFields, frozen=True, kw_only=True):
    """POST /completion, llama-server's."""

    prompt: str | list[str | int | list[str | int]] | NativePrompt
    n_probs: int | None = None
    post_sampling_probs: bool | None = None
    return_tokens: bool | None = None
    response_fields: list[str] | None = None


class ExtraFile(_Input, frozen=True, kw_only=True):
    """Another file beside the one to fill in."""

    text: str
    filename: str | None = None


class InfillRequest(GenerationFields, frozen=True, kw_only=True):
    """POST /infill, llama-server's."""

    input_prefix: str
    input_suffix: str
    input_extra: list[ExtraFile] | None = None
    prompt: str | None = None
    n_probs: int | None = None
    post_sampling_probs: bool | None = None
    return_tokens: bool | None = None
    response_fields: list[str] | None = None


class TokenizeRequest(_Input, frozen=True, kw_only=True):
    """POST /tokenize: llama-server's `content`, or vLLM's `prompt` with its own default for special tokens."""

    content: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeRequest(_Input, frozen=True, kw_only=True):
    """POST /detokenize, llama-server's."""

    tokens: list[int]


class TextObject(_Input, frozen=True, kw_only=True):
    """A text as an object: a document's `text`, llama-server's `prompt_string`, or content parts."""

    text: str | None = None
    prompt_string: str | None = None
    content: list[ContentPart] | None = None


class _TextFields(_Input, frozen=True, kw_only=True):
    """Fields of every route of an encoder."""

    model: str | None = None
    user: str | None = None
    truncate: bool | None = None
    truncate_prompt_tokens: int | None = None


class EmbeddingRequest(_TextFields, frozen=True, kw_only=True):
    """POST /v1/embeddings: OpenAI's fields, and llama-server's `content`."""

    input: str | TextObject | list[str | int | TextObject | list[str | int]] | None = None
    content: str | TextObject | list[str | int | TextObject | list[str | int]] | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    embd_normalize: int | None = None


class RerankRequest(_TextFields, frozen=True, kw_only=True):
    """POST /v1/rerank."""

    query: str
    documents: list[str | TextObject] | None = None
    texts: list[str] | None = None
    top_n: int | None = None
    return_documents: bool | None = None
    return_text: bool | None = None
    raw_scores: bool | None = None


class ScoreRequest(_TextFields, frozen=True, kw_only=True):
    """POST /v1/score."""

    text_1: str | list[str]
    text_2: str | list[str]
    raw_scores: bool | None = None


class ClassifyRequest(_TextFields, frozen=True, kw_only=True):
    """POST /classify."""

    input: str | list[str]
