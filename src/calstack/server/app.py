"""The ASGI application: routes, and the edge around them that names requests, answers errors, counts and logs."""

from __future__ import annotations

import logging
import re
import secrets
import time
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from calstack.errors import CalstackError
from calstack.server.anthropic import CountMessages, MessagesRequest, anthropic_error, understand_messages
from calstack.server.chat import understand_chat
from calstack.server.completions import understand_completion
from calstack.server.context import Context
from calstack.server.encode import Classify, Embeddings, NativeEmbeddings, Rerank, Score
from calstack.server.errors import InternalError, MethodError, NotFoundError, answer_of
from calstack.server.exchange import Endpoint, send_json
from calstack.server.inspect import Adapters, ApplyTemplate, CountChat, Props, SlotAction, Slots
from calstack.server.live import Live
from calstack.server.native import understand_infill, understand_native
from calstack.server.openapi import OpenAPI
from calstack.server.page import PAGES, Page
from calstack.server.responses import ResponsesRequest, understand_responses
from calstack.server.schemas import ChatRequest, CompletionRequest, InfillRequest, NativeRequest
from calstack.server.status import Health, Model, Models, Scrape
from calstack.server.tokens import Detokenize, Tokenize, TokenizerInfo

__all__ = ["build_app"]

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_CLIENT_LEFT = 499


def build_app(context: Context) -> ASGIApp:
    """The application of one server."""
    chat = Endpoint(context, ChatRequest, understand_chat)
    completion = Endpoint(context, CompletionRequest, understand_completion)
    routes = [
        _route("/v1/chat/completions", chat, "POST"),
        _route("/chat/completions", chat, "POST"),
        _route("/v1/completions", completion, "POST"),
        _route("/v1/models", Models(context), "GET"),
        _route("/models", Models(context), "GET"),
        _route("/v1/models/{id:path}", Model(context), "GET"),
        _route("/health", Health(context), "GET"),
        _route("/v1/health", Health(context), "GET"),
        _route("/metrics", Scrape(context), "GET"),
        _route("/metrics/events", Live(context), "GET"),
        _route("/tokenize", Tokenize(context), "POST"),
        _route("/detokenize", Detokenize(context), "POST"),
        _route("/tokenizer_info", TokenizerInfo(context), "GET"),
    ]
    native, infill = Endpoint(context, NativeRequest, understand_native), Endpoint(context, InfillRequest, understand_infill)
    routes += [
        _route("/completion", native, "POST"),
        _route("/completions", native, "POST"),
        _route("/infill", infill, "POST"),
        _route("/apply-template", ApplyTemplate(context), "POST"),
        _route("/v1/chat/completions/input_tokens", CountChat(context), "POST"),
        _route("/chat/completions/input_tokens", CountChat(context), "POST"),
        _route("/props", Props(context), "GET"),
        _route("/slots", Slots(context), "GET"),
        _route("/slots/{id:int}", SlotAction(context), "POST"),
        Route("/lora-adapters", Adapters(context), methods=["GET", "POST"]),
    ]
    responses, messages = Endpoint(context, ResponsesRequest, understand_responses), Endpoint(context, MessagesRequest, understand_messages)
    routes += [
        _route("/v1/responses", responses, "POST"),
        _route("/responses", responses, "POST"),
        _route("/v1/messages", messages, "POST"),
        _route("/v1/messages/count_tokens", CountMessages(context), "POST"),
    ]
    encoders: dict[Any, tuple[str, ...]] = {
        Embeddings(context): ("/v1/embeddings",),
        NativeEmbeddings(context): ("/embedding", "/embeddings"),
        Rerank(context): ("/v1/rerank", "/rerank", "/v1/reranking", "/reranking"),
        Score(context): ("/v1/score", "/score"),
        Classify(context): ("/classify",),
    }
    routes += [_route(path, endpoint, "POST") for endpoint, paths in encoders.items() for path in paths]
    routes += [_route(path, Page(name, kind), "GET") for path, (name, kind) in PAGES.items()]
    routes.append(_route("/openapi.json", OpenAPI(routes), "GET"))
    return _Edge(context, Router(routes, redirect_slashes=False))


def _route(path: str, endpoint: Any, method: str) -> Route:
    return Route(path, endpoint, methods=[method])


class _Edge:
    def __init__(self, context: Context, inner: ASGIApp) -> None:
        self._context, self._inner = context, inner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "lifespan and websockets are off"
        visit = _Visit(scope, send)
        visit.headers = self._context.access.cors(scope["headers"])
        try:
            if scope["method"] == "OPTIONS":
                await visit.send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
                await visit.send({"type": "http.response.body", "body": b""})
                return
            scope["calstack.account"] = account = self._context.access.check(scope["path"], scope["headers"])
            if account is not None:
                scope["calstack.log"]["key"] = account.name
            await self._inner(scope, receive, visit.send)
        except Exception as error:  # noqa: BLE001  # the one place that answers errors
            await self._answer(error, visit, scope["path"])
        finally:
            self._note(scope, visit)

    async def _answer(self, error: Exception, visit: _Visit, path: str) -> None:
        if isinstance(error, ClientDisconnect):
            visit.status = visit.status or _CLIENT_LEFT
            return
        if visit.status:  # too late for an answer: closing the connection is all that tells the client
            raise error
        answer = answer_of(_known(error))
        headers = [(name.encode(), value.encode()) for name, value in answer.headers.items()]
        if answer.status in {401, 405, 408, 413} or answer.status >= 500:
            headers.append((b"connection", b"close"))  # the rest of the body is not read
        body = anthropic_error(answer) if path.startswith("/v1/messages") else answer.body
        await send_json(visit.send, answer.status, body, headers)

    def _note(self, scope: Scope, visit: _Visit) -> None:
        route = getattr(scope.get("route"), "path", "other")
        self._context.metrics.answered(route, visit.status or _CLIENT_LEFT)
        fields = {"request_id": visit.shown, "method": scope["method"], "route": route, "status": visit.status, "ms": visit.ms()}
        fields |= scope["calstack.log"]
        if (traces := self._context.traces) is not None:
            began, choices = visit.began_ns, scope.get("calstack.choices", ())
            fields["trace_id"] = traces.record(
                headers=scope["headers"], began_ns=began, ended_ns=time.time_ns(), fields=fields, choices=choices
            )
        logger.info("request", extra=fields)


class _Visit:
    """One request at the edge: its id, and what has been sent."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._send, self._began, self.began_ns = send, time.monotonic(), time.time_ns()
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        scope["app"] = self  # makes Starlette raise HTTPException instead of answering in plain text
        scope["calstack.request_id"] = secrets.token_hex(12)
        scope["calstack.log"] = {}
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        self.shown = given.decode() if _REQUEST_ID.fullmatch(given) else scope["calstack.request_id"]

    async def send(self, message: Message) -> None:
        """Pass on, with the request id in the head."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message["headers"], (b"x-request-id", self.shown.encode()), *self.headers]
        await self._send(message)

    def ms(self) -> float:
        """Time since the request came."""
        return round((time.monotonic() - self._began) * 1e3, 3)


def _known(error: Exception) -> CalstackError:
    if isinstance(error, CalstackError):
        return error
    if isinstance(error, HTTPException):
        if error.status_code == 405:
            return MethodError("this route does not take this method", remedy="see docs/reference")
        return NotFoundError("File Not Found")
    logger.error("a request failed", exc_info=error)
    return InternalError("internal error", remedy="see the server's log")
