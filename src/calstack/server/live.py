"""GET /metrics/events: the figures of the dashboard once a second, as server-sent events."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.types import Receive, Scope, Send

from calstack.server.context import Context
from calstack.server.sse import HEADERS, event

__all__ = ["Live"]

_EVERY_S = 1.0


class Live:
    """A stream of snapshots until the client leaves or the server stops. Counters count from the server's start."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
        left = asyncio.create_task(_until_left(receive))
        try:
            while not (left.done() or self._context.draining):
                await send({"type": "http.response.body", "body": event(await self._snapshot()), "more_body": True})
                await asyncio.wait({left}, timeout=_EVERY_S)
        finally:
            left.cancel()
        await send({"type": "http.response.body", "body": b""})

    async def _snapshot(self) -> dict[str, Any]:
        context = self._context
        stats, info = await context.supervisor.fresh_stats(), context.supervisor.info
        return {
            "time_s": time.monotonic(),
            "state": context.supervisor.state.value,
            "running": stats.running if stats else 0,
            "waiting": context.admission.waiting,
            "lanes": info.max_lanes if info else 0,
            "output_tokens": stats.counters.get("tokens", 0) if stats else 0,
            "first_tokens": context.metrics.first_tokens,
            "first_token_ms": context.metrics.first_token_s * 1e3,
            "kv_used": stats.kv_blocks_used if stats else 0,
            "kv_total": stats.kv_blocks_total if stats else 0,
            "times_s": stats.times_s if stats else {},
            "memory_used": list(stats.dram_used_bytes) if stats else [],
            "memory_total": info.dram_total_bytes if info else 0,
        }


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
