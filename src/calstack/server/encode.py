"""Routes of an encoder: embeddings (OpenAI's and llama-server's), ranking, scores of pairs and classes."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from calstack.errors import CalstackError, ContextSizeError, NotInCalbin, RequestError
from calstack.server.body import decode, read_body
from calstack.server.context import Context
from calstack.server.exchange import request_id_of, send_json, watching
from calstack.server.schemas import ClassifyRequest, EmbeddingRequest, RerankRequest, ScoreRequest, TextObject
from calstack.server.status import check_model
from calstack.specs import EncoderSpec
from calstack.wire import Encode, Encoded

__all__ = ["Classify", "Embeddings", "NativeEmbeddings", "Rerank", "Score", "encoder_of"]

Row = tuple[list[int], int]  # ids, and where the second segment begins (0 = there is none)
_INLINE_BYTES = 1 << 16


def encoder_of(context: Context) -> EncoderSpec:
    """What the served encoder has.

    Raises:
        NotInCalbin: when a decoder is served.
    """
    encoder = context.model.spec.encoder
    if encoder is None:
        raise NotInCalbin("this calbin gives text, not embeddings or scores", remedy="serve an encoder's calbin")
    return encoder


@dataclasses.dataclass(frozen=True, slots=True)
class _Work:
    """A request, understood: how many texts it has, how they become ids, and how their vectors are answered."""

    texts: int
    tokenise: Callable[[], list[Row]]
    render: Callable[[Encoded, int], Any]
    """Takes what came back and the tokens of all texts."""


class _Route:
    schema: type[Any]

    def __init__(self, context: Context) -> None:
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrival, context = time.monotonic(), self._context
        context.ready()
        limits = context.config.limits
        body = await read_body(Request(scope, receive), limits.max_body_bytes, limits.body_timeout_s)
        fields = await self._decode(body)  # what no server could do is a 400 first, what this calbin lacks a 501
        work = self.understand(fields, encoder_of(context))
        if work.texts > limits.max_texts:
            raise RequestError(f"has {work.texts} texts, {limits.max_texts} may be", where="$.input", param="input")
        account, request_id = scope["calstack.account"], request_id_of(scope)
        hold = None if account is None else account.begin()
        places, tokens = context.admission.reserve(1), 0
        try:
            rows = await asyncio.get_running_loop().run_in_executor(context.pool, work.tokenise)
            tokens = sum(len(ids) for ids, _ in rows)
            if hold is not None:
                hold.take(tokens)
            context.admission.hold_tokens(places, tokens)
            encoded = await self._ask(request_id, rows, receive)
            await send_json(send, 200, work.render(encoded, tokens))
            context.metrics.ended("stop", prompt=tokens, output=0, usage=None, seconds=time.monotonic() - arrival)
        finally:
            context.admission.release(places[0], time.monotonic() - arrival)
            if hold is not None:
                hold.end(tokens)
            scope["calstack.log"] |= {"texts": work.texts, "prompt_tokens": tokens}

    def understand(self, fields: Any, encoder: EncoderSpec) -> _Work:
        """Check a decoded body. Raises CalstackError."""
        raise NotImplementedError

    async def _decode(self, body: bytes) -> Any:
        def work() -> Any:
            return decode(body, self.schema, max_depth=self._context.config.limits.max_json_depth)

        if len(body) <= _INLINE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._context.pool, work)

    async def _ask(self, request_id: str, rows: Sequence[Row], receive: Receive) -> Encoded:
        context = self._context.ready().context
        for ids, _ in rows:
            if len(ids) > context:
                raise ContextSizeError(n_prompt_tokens=len(ids), n_ctx=context)
        second = tuple(start for _, start in rows)
        message = Encode(request=request_id, texts=tuple(tuple(ids) for ids, _ in rows), second=second if any(second) else ())
        supervisor = self._context.supervisor
        answer = supervisor.encode(message)

        def left() -> None:
            if not answer.done():
                answer.set_exception(ClientDisconnect())

        async with watching(receive, left):
            try:
                return await answer
            finally:
                supervisor.forget_texts(request_id)

    # --- texts to rows ---------------------------------------------------------------------------------------------------------

    def _limit(self, truncate: bool | None, tokens: int | None) -> int:
        """Most tokens that a text is cut to; 0 = none is cut."""
        context = self._context.ready().context
        if tokens is not None and not -1 <= tokens <= context:
            raise RequestError(f"must lie in -1..{context}", where="$.truncate_prompt_tokens", param="truncate_prompt_tokens")
        if tokens:
            return context if tokens == -1 else max(tokens, 3)
        return context if truncate else 0

    def _row(self, text: str, other: str | None, limit: int) -> Row:
        return self._context.model.tokenizer.encode_text(text, other, limit=limit)

    def _model(self, wanted: str | None) -> str:
        check_model(self._context.model, wanted)
        return self._context.model.id


class Embeddings(_Route):
    """POST /v1/embeddings."""

    schema: type[Any] = EmbeddingRequest

    def understand(self, fields: EmbeddingRequest, encoder: EncoderSpec) -> _Work:
        if encoder.pooling == "none":
            raise NotInCalbin("this calbin gives scores, not embeddings", remedy="serve a sentence encoder's calbin")
        self._check(fields, encoder)
        name, inputs = self._model(fields.model), self._inputs(fields)
        limit = self._limit(fields.truncate, fields.truncate_prompt_tokens)
        return _Work(
            len(inputs),
            lambda: [self._one(one, limit) for one in inputs],
            lambda encoded, tokens: self._answer(encoded, tokens, name, fields),
        )

    def _check(self, fields: EmbeddingRequest, encoder: EncoderSpec) -> None:
        if fields.encoding_format not in {None, "float", "base64"}:
            raise RequestError("must be float or base64", where="$.encoding_format", param="encoding_format")
        hidden = self._context.model.spec.hidden
        if fields.dimensions not in {None, hidden}:
            what = f"the model has {hidden} dimensions, and none may be left out"
            raise RequestError(what, where="$.dimensions", remedy="leave it out", param="dimensions")
        if fields.embd_normalize is not None and (fields.embd_normalize == 2) != encoder.normalise:
            have = "normalised" if encoder.normalise else "not normalised"
            raise RequestError(f"embeddings of this calbin are {have}", where="$.embd_normalize", param="embd_normalize")

    def _inputs(self, fields: EmbeddingRequest) -> list[str | list[int | str]]:
        given = fields.input if fields.input is not None else fields.content
        if given is None:
            raise _missing("input")
        if isinstance(given, TextObject):
            return [_text_of(given)]
        if isinstance(given, str):
            return [given]
        if not given:
            raise RequestError("is empty", where="$.input", param="input")
        if any(isinstance(part, int) for part in given):
            if any(isinstance(part, list) for part in given):
                raise RequestError("holds ids and lists side by side", where="$.input", param="input")
            return [[part if isinstance(part, int) else _text_of(part) for part in given if not isinstance(part, list)]]
        return [list(part) if isinstance(part, list) else _text_of(part) for part in given if not isinstance(part, int)]

    def _one(self, given: str | list[int | str], limit: int) -> Row:
        """Ids that a client gives are taken as they are; texts among them bring no special tokens."""
        if isinstance(given, str):
            return self._row(given, None, limit)
        model, ids = self._context.model, list[int]()
        for part in given:
            ids += [part] if isinstance(part, int) else model.tokenizer.encode(part, special=False)
        if not ids or not all(0 <= id_ < model.spec.vocab for id_ in ids):
            what = f"holds an empty list, or an id outside the vocabulary of {model.spec.vocab}"
            raise RequestError(what, where="$.input", param="input")
        return (ids[:limit] if limit else ids), 0

    def _answer(self, encoded: Encoded, tokens: int, model: str, fields: EmbeddingRequest) -> Any:
        found = encoded.embeddings
        if fields.encoding_format == "base64":
            values: list[dict[str, Any]] = [{"embedding": base64.b64encode(one).decode(), "encoding_format": "base64"} for one in found]
        else:
            values = [{"embedding": _floats(one)} for one in found]
        data = [{"object": "embedding", "index": index} | value for index, value in enumerate(values)]
        return {"object": "list", "data": data, "model": model, "usage": _usage(tokens)}


class NativeEmbeddings(Embeddings):
    """POST /embedding, llama-server's."""

    def _answer(self, encoded: Encoded, tokens: int, model: str, fields: EmbeddingRequest) -> Any:
        return [{"index": index, "embedding": [_floats(one)]} for index, one in enumerate(encoded.embeddings)]


class _Pairs(_Route):
    """Routes that need a cross-encoder."""

    def _needs_one_label(self, encoder: EncoderSpec) -> None:
        if not encoder.labels:
            raise NotInCalbin("this calbin gives embeddings, not scores of pairs", remedy="serve a cross-encoder's calbin")
        if len(encoder.labels) != 1:
            what = f"its classifier has {len(encoder.labels)} classes, a score needs one"
            raise NotInCalbin(what, remedy="serve a cross-encoder's calbin, or use /classify")
        if encoder.types < 2:
            raise NotInCalbin("the model has no second segment, so it takes no pairs", remedy="serve a cross-encoder's calbin")


class Rerank(_Pairs):
    """POST /v1/rerank: Jina's and Cohere's fields, or those of text-embeddings-inference (`texts`)."""

    schema: type[Any] = RerankRequest

    def understand(self, fields: RerankRequest, encoder: EncoderSpec) -> _Work:
        self._needs_one_label(encoder)
        name = self._model(fields.model)
        given = fields.documents if fields.texts is None else fields.texts
        if given is None:
            raise _missing("documents")
        if not given:
            raise RequestError("is empty", where="$.documents", param="documents")
        if fields.top_n is not None and fields.top_n < 1:
            raise RequestError("must be positive", where="$.top_n", param="top_n")
        documents = [_text_of(one) for one in given]
        limit = self._limit(fields.truncate, fields.truncate_prompt_tokens)
        return _Work(
            len(documents),
            lambda: [self._row(fields.query, document, limit) for document in documents],
            lambda encoded, tokens: self._answer(encoded, tokens, name, documents, fields),
        )

    def _answer(self, encoded: Encoded, tokens: int, model: str, documents: Sequence[str], fields: RerankRequest) -> Any:
        scores = [_score(one, raw=bool(fields.raw_scores)) for one in encoded.scores]
        order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: fields.top_n]
        if fields.texts is not None:
            return [{"index": i, "score": scores[i]} | ({"text": documents[i]} if fields.return_text else {}) for i in order]
        results = [
            {"index": i, "relevance_score": scores[i]} | ({"document": {"text": documents[i]}} if fields.return_documents else {})
            for i in order
        ]
        return {"id": f"rerank-{encoded.request}", "object": "list", "model": model, "results": results, "usage": _usage(tokens)}


class Score(_Pairs):
    """POST /v1/score, vLLM's: one text against each of others, or texts pair by pair."""

    schema: type[Any] = ScoreRequest

    def understand(self, fields: ScoreRequest, encoder: EncoderSpec) -> _Work:
        self._needs_one_label(encoder)
        name = self._model(fields.model)
        first, second = _listed(fields.text_1), _listed(fields.text_2)
        if not first or not second or (len(first) not in {1, len(second)}):
            what = f"{len(first)} and {len(second)} texts make no pairs"
            raise RequestError(what, where="$.text_2", remedy="give one and any number, or as many of both", param="text_2")
        pairs = list(zip(first * (len(second) if len(first) == 1 else 1), second, strict=True))
        limit = self._limit(fields.truncate, fields.truncate_prompt_tokens)
        return _Work(
            len(pairs),
            lambda: [self._row(one, other, limit) for one, other in pairs],
            lambda encoded, tokens: self._answer(encoded, tokens, name, raw=bool(fields.raw_scores)),
        )

    def _answer(self, encoded: Encoded, tokens: int, model: str, *, raw: bool) -> Any:
        data = [{"index": index, "object": "score", "score": _score(one, raw=raw)} for index, one in enumerate(encoded.scores)]
        created, usage = int(time.time()), _usage(tokens)
        return {"id": f"score-{encoded.request}", "object": "list", "created": created, "model": model, "data": data, "usage": usage}


class Classify(_Route):
    """POST /classify, vLLM's."""

    schema: type[Any] = ClassifyRequest

    def understand(self, fields: ClassifyRequest, encoder: EncoderSpec) -> _Work:
        if not encoder.labels:
            raise NotInCalbin("this calbin has no classifier", remedy="serve a classifier's calbin")
        name, texts = self._model(fields.model), _listed(fields.input)
        if not texts:
            raise RequestError("is empty", where="$.input", param="input")
        limit = self._limit(fields.truncate, fields.truncate_prompt_tokens)
        return _Work(
            len(texts),
            lambda: [self._row(text, None, limit) for text in texts],
            lambda encoded, tokens: self._answer(encoded, tokens, name, encoder.labels),
        )

    def _answer(self, encoded: Encoded, tokens: int, model: str, labels: Sequence[str]) -> Any:
        data = []
        for index, one in enumerate(encoded.scores):
            logits = np.frombuffer(one, "<f4").astype(np.float64)
            powers = np.exp(logits - logits.max())
            probs = powers / powers.sum() if len(labels) > 1 else np.array([_sigmoid(float(logits[0]))])
            best = int(logits.argmax())
            data.append({"index": index, "label": labels[best], "probs": probs.tolist(), "num_classes": len(labels)})
        created, usage = int(time.time()), _usage(tokens)
        return {"id": f"classify-{encoded.request}", "object": "list", "created": created, "model": model, "data": data, "usage": usage}


def _missing(field: str) -> CalstackError:
    return RequestError("is missing", where=f"$.{field}", param=field)


def _text_of(given: str | TextObject) -> str:
    if isinstance(given, str):
        return given
    if given.text is not None:
        return given.text
    if given.prompt_string is not None:
        return given.prompt_string
    parts = given.content or []
    if not parts or any(part.type != "text" or part.text is None for part in parts):
        raise RequestError("holds a part that is no text", where="$.input", remedy="send texts", param="input")
    return "".join(part.text or "" for part in parts)


def _listed(given: str | list[str]) -> list[str]:
    return [given] if isinstance(given, str) else given


def _floats(values: bytes) -> list[float]:
    return np.frombuffer(values, "<f4").tolist()  # type: ignore[no-any-return]  # numpy's stub says Any


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x > -700.0 else 0.0


def _score(values: bytes, *, raw: bool) -> float:
    logit = float(np.frombuffer(values, "<f4")[0])
    return logit if raw else _sigmoid(logit)


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "total_tokens": tokens}
