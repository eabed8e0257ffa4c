"""Server-sent events."""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["DONE", "HEADERS", "PING", "event", "named_event"]

DONE = b"data: [DONE]\n\n"
PING = b":\n\n"
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a reverse proxy must not gather events
)
_encode = msgspec.json.Encoder().encode


def named_event(value: Any) -> bytes:
    """One data event that repeats its `type` as the event's name."""
    name: str = value["type"]
    return b"event: " + name.encode() + b"\n" + event(value)


def event(value: Any) -> bytes:
    """One data event."""
    return b"data: " + _encode(value) + b"\n\n"
