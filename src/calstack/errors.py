"""The one family of errors: what happened, where, what to do about it, and whether a retry helps.

Any room raises these; the command line turns them into one line and an exit code, the server into one JSON body
(`server/errors.py` is the only place that knows HTTP). Assertions are for our own bugs only.
"""

from __future__ import annotations

__all__ = [
    "ArtifactError",
    "CalstackError",
    "CancelledError",
    "ContextSizeError",
    "DeadlineError",
    "DeviceError",
    "DeviceFatal",
    "DeviceNeedsReset",
    "DeviceRetryable",
    "NotInCalbin",
    "OverloadedError",
    "RequestError",
    "SourceError",
    "UnavailableError",
    "UnsupportedError",
    "UsageError",
]


class CalstackError(Exception):
    """Base of all errors a user may see.

    Args:
        what: what went wrong, one sentence without a trailing period.
        where: file, tensor, node, field path (`$.messages[0].content`) or device; empty when `what` says it all.
        remedy: what the reader can do; empty when nothing can be done.
    """

    exit_code = 1
    retryable = False

    def __init__(self, what: str, *, where: str = "", remedy: str = "") -> None:
        self.what, self.where, self.remedy = what, where, remedy
        super().__init__(self.line())

    def line(self) -> str:
        """The error as one line: `where: what (remedy)`."""
        head = f"{self.where}: {self.what}" if self.where else self.what
        text = f"{head} ({self.remedy})" if self.remedy else head
        return " ".join(text.split())


class UsageError(CalstackError):
    """The command line or configuration is wrong."""

    exit_code = 2


class SourceError(CalstackError):
    """A model source (GGUF, safetensors, config, tokenizer, ONNX directory) is damaged or incomplete."""

    exit_code = 2


class ArtifactError(CalstackError):
    """A calbin is damaged, too new, or does not fit the device or request."""

    exit_code = 2


class UnsupportedError(CalstackError):
    """The source is sound, but this compiler or target cannot do it."""

    exit_code = 3


class RequestError(CalstackError):
    """A request is invalid (400). `param` names the offending field."""

    def __init__(self, what: str, *, where: str = "", remedy: str = "", param: str | None = None) -> None:
        super().__init__(what, where=where, remedy=remedy)
        self.param = param


class ContextSizeError(RequestError):
    """The prompt does not fit the context (400 `exceed_context_size_error`)."""

    def __init__(self, n_prompt_tokens: int, n_ctx: int) -> None:
        super().__init__(
            f"the prompt has {n_prompt_tokens} tokens, the context holds {n_ctx}",
            remedy="shorten the prompt or serve a calbin with a longer context",
            param="messages",
        )
        self.n_prompt_tokens, self.n_ctx = n_prompt_tokens, n_ctx


class NotInCalbin(CalstackError):
    """The calbin lacks the feature asked for (501)."""


class OverloadedError(CalstackError):
    """The queue is full (429). `retry_after` is in seconds."""

    retryable = True

    def __init__(self, what: str, *, retry_after: float) -> None:
        super().__init__(what, remedy=f"retry after {retry_after:.0f} s")
        self.retry_after = retry_after


class UnavailableError(CalstackError):
    """Loading, draining, or the device is down (503)."""

    retryable = True

    def __init__(self, what: str, *, retry_after: float = 1.0) -> None:
        super().__init__(what, remedy=f"retry after {retry_after:.0f} s")
        self.retry_after = retry_after


class DeadlineError(CalstackError):
    """A deadline passed (504)."""


class CancelledError(CalstackError):
    """The request was cancelled."""


class DeviceError(CalstackError):
    """Base of what a device reports about a launch or itself."""

    exit_code = 4


class DeviceRetryable(DeviceError):
    """The launch had no effect and may be submitted again."""

    retryable = True


class DeviceNeedsReset(DeviceError):
    """The device must be reset before it takes another launch; KV contents are lost."""

    retryable = True


class DeviceFatal(DeviceError):
    """The device cannot be used any more in this process."""
