"""What llama-server's clients ask about a server: /props, /slots, /apply-template, token counts, /lora-adapters."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from calstack import __version__
from calstack.errors import NotInCalbin, UnavailableError
from calstack.server.body import decode, read_body
from calstack.server.chat import ChatWork
from calstack.server.context import Context
from calstack.server.exchange import send_json
from calstack.server.native import settings_of
from calstack.server.params import generate_of
from calstack.server.schemas import ChatRequest, GenerationFields

__all__ = ["Adapters", "ApplyTemplate", "CountChat", "Props", "SlotAction", "Slots"]


class _Asked:
    def __init__(self, context: Context) -> None:
        self._context = context

    def _settings(self) -> dict[str, Any]:
        model = self._context.model
        return {**settings_of(generate_of(GenerationFields(), model.vocabulary, self._context.config.limits, model.defaults)), "seed": -1}


class Props(_Asked):
    """GET /props."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # ASGI
        info, model = self._context.ready(), self._context.model
        stats = self._context.supervisor.stats
        pieces = model.tokenizer.pieces

        def written(ids: tuple[int, ...]) -> str:
            return pieces.bytes_of(ids[0]).decode("utf-8", "replace") if ids else ""

        answer = {
            "default_generation_settings": {"params": self._settings(), "n_ctx": info.context},
            "total_slots": info.max_lanes,
            "model_alias": model.id,
            "model_path": str(self._context.config.calbin.name),
            "modalities": {"vision": False, "audio": False},
            "chat_template": model.template.source if model.template else "",
            "bos_token": written(model.spec.bos_ids),
            "eos_token": written(model.spec.eos_ids),
            "build_info": f"calstack-{__version__}",
            "is_sleeping": False,
            "calbin": info.calbin,
            "device": info.device,
            "device_status": stats.device_status if stats else 0,
            "memory_total_bytes": info.dram_total_bytes,
            "memory_used_bytes": sum(stats.dram_used_bytes) if stats else 0,
            "submodels": list(info.submodels),
        }
        await send_json(send, 200, answer)


class Slots(_Asked):
    """GET /slots: one entry per lane; the lanes that run come first."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # ASGI
        info = self._context.ready()
        stats = await self._context.supervisor.fresh_stats()
        busy = stats.lanes_used if stats else 0
        if Request(scope).query_params.get("fail_on_no_slot") and busy >= info.max_lanes:
            raise UnavailableError("no slot is idle")
        slots = [{"id": lane, "n_ctx": info.context, "speculative": False, "is_processing": lane < busy} for lane in range(info.max_lanes)]
        await send_json(send, 200, slots)


class SlotAction(_Asked):
    """POST /slots/{id}: states of lanes are not kept in files."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # ASGI
        raise NotInCalbin("states of slots cannot be saved, restored or erased", remedy="the prefix cache needs no files")


class Adapters(_Asked):
    """/lora-adapters."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # ASGI
        raise NotInCalbin("this calbin has no adapter slots", remedy="merge the adapter before compiling")


class ApplyTemplate(_Asked):
    """POST /apply-template: the prompt of a chat body."""

    schema: type[Any] = ChatRequest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # ASGI
        limits = self._context.config.limits
        body = await read_body(Request(scope, receive), limits.max_body_bytes, limits.body_timeout_s)
        await send_json(send, 200, await asyncio.get_running_loop().run_in_executor(self._context.pool, lambda: self._answer(body)))

    def _work(self, body: bytes) -> ChatWork:
        return ChatWork(self._context, decode(body, ChatRequest, max_depth=self._context.config.limits.max_json_depth))

    def _answer(self, body: bytes) -> dict[str, Any]:
        return {"prompt": self._work(body).prompt()}


class CountChat(ApplyTemplate):
    """POST /v1/chat/completions/input_tokens."""

    def _answer(self, body: bytes) -> dict[str, Any]:
        return {"object": "response.input_tokens", "input_tokens": len(self._work(body).prompt_ids())}
