"""Request bodies: bounded in size and nesting before anything parses them, then decoded into a schema."""

from __future__ import annotations

import asyncio
import re
from typing import TypeVar

import msgspec
from starlette.requests import Request

from calstack.errors import RequestError
from calstack.server.errors import BodyTooLargeError, SlowBodyError

__all__ = ["check_depth", "decode", "read_body"]

T = TypeVar("T")

# A string is skipped whole; an unterminated one hides the rest, and the parser refuses it.
_STRUCTURE = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|$)|[\[{]|[\]}]', re.DOTALL)
_PATH = re.compile(r" - at `(?:key in )?([^`]*)`$")
_MISSING = re.compile(r"missing required field `([^`]*)`")


async def read_body(request: Request, limit: int, seconds: float) -> bytes:
    """The whole body.

    Raises:
        SlowBodyError: when it takes longer than `seconds`.
        BodyTooLargeError: as soon as it is known to be longer than `limit` bytes.
    """
    announced = request.headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and int(announced[:20]) > limit:
        raise _too_large(limit)
    try:
        return await asyncio.wait_for(_gathered(request, limit), seconds)
    except TimeoutError as error:
        raise SlowBodyError(f"the body did not come within {seconds:g} s") from error


async def _gathered(request: Request, limit: int) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
    return b"".join(parts)


def decode(body: bytes, schema: type[T], *, max_depth: int) -> T:
    """`body` as a `schema`. Unknown fields are ignored, as OpenAI's servers do; known ones are strict.

    Raises:
        RequestError: with the path of the field that is wrong.
    """
    check_depth(body, max_depth)
    try:
        return msgspec.json.decode(body, type=schema)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}", remedy="send a JSON object in UTF-8") from error


def check_depth(body: bytes, limit: int) -> None:
    """Raise RequestError when arrays and objects are nested deeper than `limit`."""
    if body.count(b"[") + body.count(b"{") <= limit:
        return
    depth = 0
    for found in _STRUCTURE.finditer(body):
        first = found[0][:1]
        if first in b"[{":
            depth += 1
            if depth > limit:
                raise RequestError(f"the body is nested deeper than {limit} levels", remedy="flatten it")
        elif first in b"]}":
            depth -= 1


def _invalid(message: str) -> RequestError:
    path = found[1] if (found := _PATH.search(message)) else "$"
    what = _PATH.sub("", message)
    if missing := _MISSING.search(what):
        path = f"{path}.{missing[1]}"
    param = path.removeprefix("$").removeprefix(".").removesuffix("[...]") or None
    return RequestError(what, where=path, param=param)


def _too_large(limit: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"the body is larger than {limit} bytes", remedy="send less, or serve with a larger limit")
