"""POST /tokenize and /detokenize, llama-server's and vLLM's shapes; GET /tokenizer_info, vLLM's."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from calstack.errors import RequestError
from calstack.server.body import decode, read_body
from calstack.server.context import Context
from calstack.server.exchange import send_json
from calstack.server.schemas import DetokenizeRequest, TokenizeRequest
from calstack.text.detokenize import decode_all

__all__ = ["Detokenize", "Tokenize", "TokenizerInfo"]


class _Route:
    schema: type[Any]

    def __init__(self, context: Context) -> None:
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limits = self._context.config.limits
        body = await read_body(Request(scope, receive), limits.max_body_bytes, limits.body_timeout_s)

        def work() -> dict[str, Any]:
            return self.answer(decode(body, self.schema, max_depth=limits.max_json_depth))

        await send_json(send, 200, await asyncio.get_running_loop().run_in_executor(self._context.pool, work))

    def answer(self, fields: Any) -> dict[str, Any]:
        """The answer's body; runs in a thread."""
        raise NotImplementedError


class Tokenize(_Route):
    """Ids of a text."""

    schema = TokenizeRequest

    def answer(self, fields: TokenizeRequest) -> dict[str, Any]:
        tokenizer = self._context.model.tokenizer
        if (fields.content is None) == (fields.prompt is None):
            raise RequestError("wants content or prompt", where="$.content", param="content")
        if fields.content is None:
            return self._vllm(fields, fields.prompt or "")
        ids = tokenizer.encode(fields.content, special=fields.parse_special is not False, bos=bool(fields.add_special))
        if not fields.with_pieces:
            return {"tokens": ids}
        return {"tokens": [{"id": id_, "piece": _piece(tokenizer.pieces.bytes_of(id_))} for id_ in ids]}

    def _vllm(self, fields: TokenizeRequest, prompt: str) -> dict[str, Any]:
        model = self._context.model
        ids = model.tokenizer.encode(prompt, special=True, bos=fields.add_special_tokens is not False)
        return {"tokens": ids, "count": len(ids), "max_model_len": self._context.ready().context}


class TokenizerInfo:
    """What evaluation harnesses ask of a tokenizer that they do not have themselves."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        model = self._context.model
        pieces, spec = model.tokenizer.pieces, model.spec
        pad = () if spec.pad_id is None else (spec.pad_id,)
        first = {"bos_token": spec.bos_ids, "eos_token": model.vocabulary.end_ids, "pad_token": pad}
        answer: dict[str, Any] = {name: pieces.bytes_of(ids[0]).decode("utf-8", "replace") if ids else None for name, ids in first.items()}
        template = model.template.source if model.template is not None else None
        await send_json(send, 200, {**answer, "chat_template": template, "model_max_length": self._context.ready().context})


class Detokenize(_Route):
    """Text of ids, special tokens in their written form."""

    schema = DetokenizeRequest

    def answer(self, fields: DetokenizeRequest) -> dict[str, Any]:
        model = self._context.model
        for place, id_ in enumerate(fields.tokens):
            if not 0 <= id_ < model.vocabulary.size:
                where = f"tokens[{place}]"
                raise RequestError(f"id {id_} is not in the vocabulary of {model.vocabulary.size}", where=f"$.{where}", param=where)
        text = decode_all(model.tokenizer.pieces, fields.tokens)
        return {"content": text, "prompt": text}


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)
