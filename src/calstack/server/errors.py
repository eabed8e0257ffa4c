"""Errors to HTTP: the one place that knows how each error of `calstack.errors` is answered."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from calstack import errors
from calstack.errors import CalstackError
from calstack.wire import ErrorValue

__all__ = [
    "Answer",
    "AuthenticationError",
    "BodyTooLargeError",
    "ConflictError",
    "ForbiddenError",
    "InternalError",
    "MethodError",
    "NotFoundError",
    "SlowBodyError",
    "answer_of",
    "error_of",
]


class NotFoundError(errors.RequestError):
    """No such route or model (404)."""


class AuthenticationError(errors.RequestError):
    """No valid API key (401)."""


class ForbiddenError(errors.RequestError):
    """Known, but not allowed to (403)."""


class ConflictError(errors.RequestError):
    """Something else is being done (409)."""


class SlowBodyError(errors.RequestError):
    """The body took too long to come (408)."""


class MethodError(errors.RequestError):
    """The route does not take this method (405)."""


class BodyTooLargeError(errors.RequestError):
    """The body is larger than allowed (413)."""


class InternalError(CalstackError):
    """Something of ours failed (500); details are in the log."""


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """An error as HTTP: status, OpenAI-shaped body (with llama-server's integer code), headers."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str]


# The first class that fits decides.
_RULES: tuple[tuple[type[CalstackError], int, str], ...] = (
    (errors.ContextSizeError, 400, "exceed_context_size_error"),
    (NotFoundError, 404, "not_found_error"),
    (AuthenticationError, 401, "authentication_error"),
    (ForbiddenError, 403, "permission_error"),
    (ConflictError, 409, "conflict_error"),
    (SlowBodyError, 408, "timeout_error"),
    (MethodError, 405, "invalid_request_error"),
    (BodyTooLargeError, 413, "invalid_request_error"),
    (errors.RequestError, 400, "invalid_request_error"),
    (errors.NotInCalbin, 501, "not_supported_error"),
    (errors.UnsupportedError, 501, "not_supported_error"),
    (errors.OverloadedError, 429, "rate_limit_error"),
    (errors.UnavailableError, 503, "unavailable_error"),
    (errors.DeviceRetryable, 503, "unavailable_error"),
    (errors.DeviceNeedsReset, 503, "unavailable_error"),
    (errors.DeadlineError, 504, "timeout_error"),
    (errors.CancelledError, 499, "cancelled_error"),
    (CalstackError, 500, "server_error"),
)


def answer_of(error: CalstackError) -> Answer:
    """How `error` is answered."""
    status, kind = next((status, kind) for rule, status, kind in _RULES if isinstance(error, rule))
    body: dict[str, Any] = {"message": error.line(), "type": kind, "param": getattr(error, "param", None), "code": status}
    if isinstance(error, errors.ContextSizeError):
        body |= {"n_prompt_tokens": error.n_prompt_tokens, "n_ctx": error.n_ctx}
    headers = {}
    if (retry_after := getattr(error, "retry_after", None)) is not None:
        headers["retry-after"] = str(max(1, math.ceil(retry_after)))
    elif status == 503:
        headers["retry-after"] = "1"
    return Answer(status, {"error": body}, headers)


def error_of(value: ErrorValue) -> CalstackError:
    """The error the engine reported, as an exception of the same class."""
    match value.kind:
        case "OverloadedError":
            return errors.OverloadedError(value.message, retry_after=value.retry_after or 1.0)
        case "UnavailableError":
            return errors.UnavailableError(value.message, retry_after=value.retry_after or 1.0)
        case "RequestError" | "ContextSizeError":
            return errors.RequestError(value.message, param=value.param)
    known = getattr(errors, value.kind, None)
    return known(value.message) if isinstance(known, type) and issubclass(known, CalstackError) else CalstackError(value.message)
