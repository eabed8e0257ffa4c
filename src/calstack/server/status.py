"""What the server says about itself: models, health, metrics."""

from __future__ import annotations

from typing import Any

from starlette.types import Receive, Scope, Send

from calstack.server.context import Context
from calstack.server.errors import NotFoundError
from calstack.server.exchange import send_json
from calstack.server.metrics import CONTENT_TYPE
from calstack.server.model import ServedModel

__all__ = ["Health", "Model", "Models", "Scrape", "check_model"]


def check_model(model: ServedModel, wanted: str | None) -> None:
    """Raise NotFoundError unless a request may name the model so. No name, or an empty one, means the only model."""
    if wanted and wanted not in model.names:
        raise NotFoundError(f"there is no model {wanted[:100]!r}", where="$.model", remedy=f"use {model.id!r}", param="model")


class _Route:
    def __init__(self, context: Context) -> None:
        self._context = context

    def _entry(self) -> dict[str, Any]:
        model, info = self._context.model, self._context.supervisor.info
        meta = {
            "n_vocab": model.spec.vocab,
            "n_ctx": info.context if info else model.spec.context,
            "n_ctx_train": model.spec.context,
            "n_embd": model.spec.hidden,
        }
        return {
            "id": model.id,
            "object": "model",
            "created": model.created,
            "owned_by": "calstack",
            "root": model.id,
            "parent": None,
            "max_model_len": meta["n_ctx"],
            "aliases": sorted(model.names),
            "meta": meta,
        }


class Models(_Route):
    """GET /v1/models."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # ASGI
        await send_json(send, 200, {"object": "list", "data": [self._entry()]})


class Model(_Route):
    """GET /v1/models/{id}."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # ASGI
        check_model(self._context.model, scope["path_params"]["id"])
        await send_json(send, 200, self._entry())


class Health(_Route):
    """GET /health: 200 when requests are taken, 503 while loading, draining, or when the engine is down."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # ASGI
        info, supervisor = self._context.ready(), self._context.supervisor
        stats = supervisor.ask_stats()  # not waited for: a probe is answered at once, whatever the engine does
        device = {
            "device": info.device,
            "device_status": stats.device_status if stats else 0,
            "calbin": info.calbin,
            "submodels": list(info.submodels),
            "memory_used_bytes": sum(stats.dram_used_bytes) if stats else 0,
            "memory_total_bytes": info.dram_total_bytes,
            "restarts": supervisor.restarts,
        }
        await send_json(send, 200, {"status": "ok", **device})


class Scrape(_Route):
    """GET /metrics."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # ASGI
        await self._context.supervisor.fresh_stats()
        body = self._context.metrics.text()
        started = str(int(self._context.metrics.started)).encode()
        headers = [(b"content-type", CONTENT_TYPE.encode()), (b"process-start-time-unix", started)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
