"""GET /openapi.json: the routes and their request bodies, described from the routes themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from calstack import __version__
from calstack.server.exchange import send_json

__all__ = ["OpenAPI", "describe"]

_REF = "#/components/schemas/{name}"
_ERROR: dict[str, Any] = {
    "type": "object",
    "properties": {"error": {"type": "object", "properties": {"message": {"type": "string"}, "type": {"type": "string"}}}},
    "required": ["error"],
}


class OpenAPI:
    """The description as an ASGI application; made once."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._answer = describe(routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, 200, self._answer)


def describe(routes: Iterable[Route]) -> dict[str, Any]:
    """OpenAPI 3.1. An endpoint with a `schema` (a msgspec type) takes a JSON body of it; the others take none."""
    routes = list(routes)
    kinds = list(dict.fromkeys(kind for route in routes if (kind := getattr(route.endpoint, "schema", None)) is not None))
    found, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    bodies = dict(zip(kinds, found, strict=True))
    paths: dict[str, Any] = {}
    for route in routes:
        for method in sorted((route.methods or set()) - {"HEAD"}):
            body = bodies.get(getattr(route.endpoint, "schema", None))
            paths.setdefault(route.path_format, {})[method.lower()] = _operation(route, body)
    return {
        "openapi": "3.1.0",
        "info": {"title": "calstack", "version": __version__},
        "paths": paths,
        "components": {"schemas": {**components, "Error": _ERROR}},
    }


def _operation(route: Route, body: dict[str, Any] | None) -> dict[str, Any]:
    failed = {"description": "an error", "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
    operation: dict[str, Any] = {
        "responses": {"200": {"description": "the answer; a stream of events where `stream` is true"}, "default": failed}
    }
    if told := (type(route.endpoint).__doc__ or "").strip():
        operation["summary"] = told.splitlines()[0]
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    if route.param_convertors:
        kinds = {name: "integer" if type(one).__name__ == "IntegerConvertor" else "string" for name, one in route.param_convertors.items()}
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": kind}} for name, kind in kinds.items()]
    return operation
