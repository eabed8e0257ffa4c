"""POST /tokenize and /detokenize, llama-server's shapes."""

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

__all__ = ["Detokenize", "Tokenize"]


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
        ids = tokenizer.encode(fields.content, special=fields.parse_special is not False, bos=bool(fields.add_special))
        if not fields.with_pieces:
            return {"tokens": ids}
        return {"tokens": [{"id": id_, "piece": _piece(tokenizer.pieces.bytes_of(id_))} for id_ in ids]}


class Detokenize(_Route):
    """Text of ids, special tokens in their written form."""

    schema = DetokenizeRequest

    def answer(self, fields: DetokenizeRequest) -> dict[str, Any]:
        model = self._context.model
        for place, id_ in enumerate(fields.tokens):
            if not 0 <= id_ < model.vocabulary.size:
                where = f"tokens[{place}]"
                raise RequestError(f"id {id_} is not in the vocabulary of {model.vocabulary.size}", where=f"$.{where}", param=where)
        return {"content": decode_all(model.tokenizer.pieces, fields.tokens)}


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)
