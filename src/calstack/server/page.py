"""The page for people at `/`: a few files, read at start, under fixed names."""

from __future__ import annotations

import importlib.resources

from starlette.types import Receive, Scope, Send

__all__ = ["PAGES", "Page"]

PAGES = {
    "/": ("index.html", b"text/html; charset=utf-8"),
    "/static/style.css": ("style.css", b"text/css; charset=utf-8"),
    "/static/icon.svg": ("icon.svg", b"image/svg+xml"),
    **{f"/static/{name}.js": (f"{name}.js", b"text/javascript; charset=utf-8") for name in ("app", "dashboard", "stream", "tokens")},
}
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    b"frame-ancestors 'none'; form-action 'none'"
)


class Page:
    """One file. Scripts of other origins never run in it."""

    def __init__(self, name: str, kind: bytes) -> None:
        self._body = (importlib.resources.files("calstack.server") / "static" / name).read_bytes()
        size = str(len(self._body)).encode()
        self._head = [(b"content-type", kind), (b"content-length", size), (b"content-security-policy", _POLICY)]
        self._head += [(b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-cache")]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # ASGI
        await send({"type": "http.response.start", "status": 200, "headers": list(self._head)})
        await send({"type": "http.response.body", "body": self._body})
