"""The course of every generating route: read, check, take a place, tokenise, generate, answer; and what happens when the client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from calstack.errors import CalstackError, NotInCalbin, RequestError, UnavailableError
from calstack.server.accounts import Account
from calstack.server.body import decode, read_body
from calstack.server.choice import Delta, End
from calstack.server.context import Context
from calstack.server.errors import Answer, answer_of
from calstack.server.generation import Generation
from calstack.server.params import Generate
from calstack.server.render import Collected, Renderer
from calstack.server.sse import DONE, HEADERS, PING, event
from calstack.text.thoughts import ThoughtMeter

__all__ = ["Endpoint", "Plan", "request_id_of", "send_json", "watching"]

_GRAMMAR_S = 10.0
_LOGGED_BYTES = 1 << 16
_INLINE_BYTES = 1 << 16  # larger bodies are decoded off the event loop


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One request, understood."""

    generate: Generate
    prompts: int
    """How many prompts it has."""
    tokenise: Callable[[], list[list[int]]]
    """Gives every prompt's ids; runs in a thread."""
    renderer: Renderer
    top_logprobs: int = -1
    prompt_logprobs: int = -1
    """As top_logprobs, for the prompts' own ids; -1 = they are not scored."""
    constrain: Callable[[], str] | None = None
    """Gives the grammar that the answers must match, checked; runs in a thread, after `tokenise`."""
    frame: Callable[[Any], bytes] = event
    """Writes one stream event."""
    done: bytes = DONE
    """Ends a stream."""
    failed: Callable[[Answer], Any] = lambda answer: answer.body
    """The stream event of an error."""
    meter: Callable[[int], ThoughtMeter | None] = lambda _: None
    """Makes what counts the thought of one answer of so many tokens."""
    close_thought: Callable[[], list[int]] = list
    """Gives the ids that end a thought."""


class Endpoint:
    """A generating route as an ASGI application.

    Args:
        context: the server's parts.
        schema: of the request body.
        understand: checks a decoded body and says what to do; raises CalstackError.
    """

    def __init__(self, context: Context, schema: type[Any], understand: Callable[[Context, Any, str], Plan]) -> None:
        self._context, self.schema, self._understand = context, schema, understand

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrival, request_id = time.monotonic(), request_id_of(scope)
        self._context.ready()
        limits = self._context.config.limits
        body = await read_body(Request(scope, receive), limits.max_body_bytes, limits.body_timeout_s)
        if self._context.config.log.prompts:
            scope["calstack.log"]["body"] = body[:_LOGGED_BYTES].decode("utf-8", "replace")
        fields = await self._decode(body)
        if self._context.model.spec.encoder is not None:
            raise NotInCalbin("this calbin is an encoder and generates no text", remedy="serve a decoder's calbin")
        plan = self._understand(self._context, fields, request_id)
        account: Account | None = scope["calstack.account"]
        with Generation(
            self._context, request_id, plan.generate, arrival=arrival, top_logprobs=plan.top_logprobs, account=account
        ) as generation:
            generation.prompt_logprobs = plan.prompt_logprobs
            async with watching(receive, generation.client_left):
                try:
                    await self._begin(plan, generation)
                    await _Answer(self._context, plan, generation, send).run()
                finally:
                    scope["calstack.log"] |= generation.summary()
                    scope["calstack.choices"] = generation.traces

    async def _decode(self, body: bytes) -> Any:
        def work() -> Any:
            return decode(body, self.schema, max_depth=self._context.config.limits.max_json_depth)

        if len(body) <= _INLINE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._context.pool, work)

    async def _begin(self, plan: Plan, generation: Generation) -> None:
        context = self._context.ready().context  # from here on the request is accepted: a drain lets it finish
        generation.reserve(plan.prompts)
        loop = asyncio.get_running_loop()
        prompts = await loop.run_in_executor(self._context.pool, plan.tokenise)
        generation.add_prompts(prompts, context)
        if plan.constrain is not None:
            if plan.generate.min_tokens:
                raise RequestError("cannot go with a constraint", where="$.min_tokens", param="min_tokens")
            generation.grammar = await _in_time(loop.run_in_executor(self._context.grammar_pool, plan.constrain))
        generation.meter, generation.close_thought = plan.meter, plan.close_thought
        generation.start()


async def _in_time(work: asyncio.Future[str]) -> str:
    try:
        return await asyncio.wait_for(work, _GRAMMAR_S)
    except TimeoutError as error:
        raise RequestError("the grammar takes too long to compile", remedy="ask for less", param="grammar") from error


class _Answer:
    """Writes a generation to the client."""

    def __init__(self, context: Context, plan: Plan, generation: Generation, send: Send) -> None:
        self._context, self._plan, self._generation, self._send = context, plan, generation, send
        self._started = False

    async def run(self) -> None:
        if not self._plan.generate.stream:
            await self._whole()
            return
        try:
            await self._stream()
        except CalstackError as error:
            if not self._started:
                raise
            answer = answer_of(error)
            self._context.metrics.failed(answer.status)
            await self._body(self._plan.frame(self._plan.failed(answer)) + self._plan.done, more=False)

    async def _whole(self) -> None:
        choices = [Collected(index) for index in range(self._generation.count)]
        async for batch in self._generation.deltas(3600.0):
            for delta in batch:
                _raise_of(delta.end)
                choices[delta.index].add(delta)
        await send_json(self._send, 200, self._plan.renderer.whole(choices, self._generation))

    async def _stream(self) -> None:
        renderer = self._plan.renderer
        async for batch in self._generation.deltas(self._context.config.limits.keepalive_s):
            if batch:
                await self._deltas(batch, renderer)
            elif self._started:
                await self._body(PING)
        await self._body(b"".join(map(self._plan.frame, renderer.tail(self._generation))) + self._plan.done, more=False)

    async def _deltas(self, batch: list[Delta], renderer: Renderer) -> None:
        """The status is held until the first token, so that an early error is a plain HTTP answer."""
        if not self._started:
            for delta in batch:
                _raise_of(delta.end)
            self._started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
        out: list[bytes] = []
        for delta in batch:
            if delta.end is not None and (delta.end.error or delta.end.cancelled):
                await self._body(b"".join(out))
                _raise_of(delta.end)
            out.extend(map(self._plan.frame, renderer.chunks(delta)))
        await self._body(b"".join(out))

    async def _body(self, data: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


def _raise_of(end: End | None) -> None:
    if end is not None and end.error is not None:
        raise end.error
    if end is not None and end.cancelled:
        raise UnavailableError("the request was cancelled by the server")


@contextlib.asynccontextmanager
async def watching(receive: Receive, on_left: Callable[[], None]) -> AsyncIterator[None]:
    """Call `on_left` when the client closes the connection."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        on_left()

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()


def request_id_of(scope: Scope) -> str:
    """The request's id, set at the edge."""
    return str(scope["calstack.request_id"])


async def send_json(send: Send, status: int, value: Any, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    """One JSON answer."""
    body = msgspec.json.encode(value)
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})
