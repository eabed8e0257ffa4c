"""The routes of the operations plane, and what they do."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, get_args

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from calstack.errors import CalstackError, RequestError
from calstack.server.body import decode, read_body
from calstack.server.config import LogLevel
from calstack.server.context import Context
from calstack.server.errors import AuthenticationError, ConflictError, ForbiddenError, InternalError, NotFoundError, answer_of
from calstack.server.exchange import send_json
from calstack.server.ops.audit import AuditLog
from calstack.server.ops.gate import Caller, Gate, Role
from calstack.server.supervisor import EngineState
from calstack.server.switch import StopSwitch
from calstack.wire import DeviceAnswer

__all__ = ["ROUTES", "OpsPlane"]

logger = logging.getLogger(__name__)

_BODY_BYTES = 1 << 12
_BODY_S = 5.0
_STATUS_S = 3.0


class _Order(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    exit: bool = False  # drain: end the server when nothing is left
    level: str = ""  # log-level
    mode: str = ""  # power
    name: str = ""  # register


@dataclasses.dataclass(frozen=True, slots=True)
class _Route:
    method: str
    role: Role
    run: Callable[[OpsPlane, _Order], Awaitable[dict[str, Any]]]


class OpsPlane:
    """An ASGI application. Everything but `GET /status` is audited before it is begun and when it has ended, and runs alone.

    Args:
        context: the server's parts.
        gate: knows who may.
        audit: where it is written down.
        switch: pressed to end the server, as SIGTERM does.
    """

    def __init__(self, context: Context, gate: Gate, audit: AuditLog, switch: StopSwitch) -> None:
        self._context, self._gate, self._audit, self._switch = context, gate, audit, switch
        self._busy = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            value = await self._visit(scope, receive)
        except ClientDisconnect:
            return
        except Exception as error:  # the one place that answers errors
            if not isinstance(error, CalstackError):
                logger.exception("an operation failed")
                error = InternalError("internal error", remedy="see the server's log")
            answer = answer_of(error)
            headers = [(name.encode(), text.encode()) for name, text in answer.headers.items()]
            await send_json(send, answer.status, answer.body, [*headers, (b"connection", b"close")])
            return
        await send_json(send, 200, value)

    async def _visit(self, scope: Scope, receive: Receive) -> dict[str, Any]:
        path, method = scope["path"], scope["method"]
        try:
            caller = self._gate.admit(scope.get("calstack.peer"), scope["headers"], time.monotonic())
        except AuthenticationError:
            await self._note("nobody", path[:100], "denied", f"uid:{scope.get('calstack.peer')}")
            raise
        route = ROUTES.get(path)
        if route is None or route.method != method:
            raise NotFoundError(f"there is no {method} {path[:100]}", remedy="see docs/guides/operating.md")
        try:
            caller.need(route.role)
        except ForbiddenError:
            await self._note(caller.name, path, "denied")
            raise
        order = await self._order(scope, receive) if method == "POST" else _Order()
        return await (route.run(self, order) if route.role is Role.VIEWER else self._alone(route, order, path, caller))

    async def _order(self, scope: Scope, receive: Receive) -> _Order:
        body = await read_body(Request(scope, receive), _BODY_BYTES, _BODY_S)
        return decode(body, _Order, max_depth=2) if body.strip() else _Order()

    async def _alone(self, route: _Route, order: _Order, path: str, caller: Caller) -> dict[str, Any]:
        """Run what changes something: one at a time, never without a record, and to its end even when the caller leaves."""
        if self._busy:
            raise ConflictError(f"{self._busy} is being done", remedy="wait for its end")
        self._busy = path
        return await asyncio.shield(asyncio.create_task(self._recorded(route, order, path, caller)))

    async def _recorded(self, route: _Route, order: _Order, path: str, caller: Caller) -> dict[str, Any]:
        detail = {name: value for name, value in msgspec.structs.asdict(order).items() if value}
        try:
            await self._note(caller.name, path, "begun", detail)
            try:
                value = await route.run(self, order)
            except Exception as error:
                await self._note(
                    caller.name, path, "failed", error.line()[:1000] if isinstance(error, CalstackError) else type(error).__name__
                )
                raise
            await self._note(caller.name, path, "done")
            return value
        finally:
            self._busy = ""

    async def _note(self, who: str, action: str, outcome: str, detail: Any = "") -> None:
        logger.info("operation", extra={"who": who, "action": action, "outcome": outcome})
        await asyncio.to_thread(self._audit.append, who=who, action=action, outcome=outcome, detail=detail)

    # --- what can be done ------------------------------------------------------------------------------------------------------

    async def status(self, _order: _Order) -> dict[str, Any]:
        """How the server and its device are."""
        context, supervisor = self._context, self._context.supervisor
        answer, error = None, supervisor.error
        if supervisor.state is EngineState.READY:
            try:
                answer = await supervisor.command("status", timeout_s=_STATUS_S)
            except CalstackError as failure:  # an engine that hangs is what an operator looks for
                error = failure
        return {
            "model": context.model.id,
            "engine": supervisor.state.value,
            "error": error.line() if error else None,
            "restarts": supervisor.restarts,
            "draining": context.draining,
            "in_flight": context.admission.in_flight,
            "waiting": context.admission.waiting,
            "log_level": logging.getLevelName(logging.getLogger("calstack").getEffectiveLevel()).lower(),
            "audit": {"records": self._audit.chain.records, "head": self._audit.chain.head},
            "device": _device(answer) if answer is not None else None,
        }

    async def reset(self, _order: _Order) -> dict[str, Any]:
        """Reset the device; requests go on from their last token."""
        return _device(await self._context.supervisor.command("reset", timeout_s=60.0))

    async def dump(self, _order: _Order) -> dict[str, Any]:
        """Write the last launches into the configured directory."""
        return {"path": (await self._context.supervisor.command("dump")).text}

    async def drain(self, order: _Order) -> dict[str, Any]:
        """Take no new work."""
        self._context.draining = True
        if order.exit and not self._switch.drain.is_set():
            self._switch.press()
        return {"draining": True, "in_flight": self._context.admission.in_flight}

    async def resume(self, _order: _Order) -> dict[str, Any]:
        """Take new work again."""
        if self._switch.drain.is_set():
            raise ConflictError("the server is about to end")
        self._context.draining = False
        return {"draining": False}

    async def log_level(self, order: _Order) -> dict[str, Any]:
        """Set the least severe level that is logged."""
        if order.level not in get_args(LogLevel):
            raise RequestError("is not a level", where="$.level", remedy=f"one of {', '.join(get_args(LogLevel))}", param="level")
        logging.getLogger("calstack").setLevel(order.level.upper())
        return {"log_level": order.level}

    async def power(self, order: _Order) -> dict[str, Any]:
        """Choose the device's power mode."""
        return {"mode": (await self._context.supervisor.command("power", order.mode)).text}

    async def register(self, order: _Order) -> dict[str, Any]:
        """Read a register that the configuration allows."""
        if order.name not in self._context.config.ops.registers:
            raise ForbiddenError(
                f"register {order.name[:64]!r} may not be read", where="$.name", remedy="ops.registers names those that may"
            )
        return {"name": order.name, "value": int((await self._context.supervisor.command("register", order.name)).text)}


def _device(answer: DeviceAnswer) -> dict[str, Any]:
    return {"name": answer.device, "status": answer.status, "chips": [msgspec.structs.asdict(chip) for chip in answer.chips]}


ROUTES: dict[str, _Route] = {
    "/status": _Route("GET", Role.VIEWER, OpsPlane.status),
    "/reset": _Route("POST", Role.OPERATOR, OpsPlane.reset),
    "/dump": _Route("POST", Role.OPERATOR, OpsPlane.dump),
    "/drain": _Route("POST", Role.OPERATOR, OpsPlane.drain),
    "/resume": _Route("POST", Role.OPERATOR, OpsPlane.resume),
    "/log-level": _Route("POST", Role.OPERATOR, OpsPlane.log_level),
    "/power": _Route("POST", Role.OPERATOR, OpsPlane.power),
    "/register": _Route("POST", Role.OPERATOR, OpsPlane.register),
}
