"""What the holder of one API key may have: requests and tokens in flight, and in a minute."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from calstack.errors import OverloadedError
from calstack.server.bucket import Bucket

__all__ = ["Account", "Hold", "KeyLimits"]

_RETRY_S = 1.0  # how soon something in flight may have ended


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """Bounds of one key; 0 = none. Tokens are those of the prompt and those that the answer may have; a request alone may exceed them."""

    requests: int = 0
    tokens: int = 0
    requests_per_minute: int = 0
    tokens_per_minute: int = 0


class Account:
    """One key's use. All methods run on the event loop.

    Args:
        name: of the key; it orders the queue fairly.
        limits: of the key.
        clock: seconds, monotonic.
    """

    def __init__(self, name: str, limits: KeyLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.name, self.limits = name, limits
        self.requests = self.tokens = 0
        self.refused = 0
        self._clock = clock
        self._request_flow = _per_minute(limits.requests_per_minute)
        self._token_flow = _per_minute(limits.tokens_per_minute)

    def begin(self) -> Hold:
        """A request begins.

        Raises:
            OverloadedError: when the key has too many, naming the limit.
        """
        if self.limits.requests and self.requests >= self.limits.requests:
            raise self._refusal("requests", self.limits.requests, _RETRY_S)
        if self._request_flow is not None:
            now = self._clock()
            if wait := self._request_flow.wait_s(1.0, now):
                raise self._refusal("requests_per_minute", self.limits.requests_per_minute, wait)
            self._request_flow.take(1.0, now)
        self.requests += 1
        return Hold(self)

    def take(self, tokens: int) -> None:
        """Tokens of a request that has begun. Raises OverloadedError as `begin`."""
        if self.limits.tokens and self.tokens and self.tokens + tokens > self.limits.tokens:
            raise self._refusal("tokens", self.limits.tokens, _RETRY_S)
        if self._token_flow is not None:
            now = self._clock()
            if wait := self._token_flow.wait_s(tokens, now):
                raise self._refusal("tokens_per_minute", self.limits.tokens_per_minute, wait)
            self._token_flow.take(tokens, now)
        self.tokens += tokens

    def end(self, tokens: int, used: int) -> None:
        """A request that took `tokens` and used `used` of them has ended; the rest counts for nothing."""
        self.requests -= 1
        self.tokens -= tokens
        if self._token_flow is not None:
            self._token_flow.take(used - tokens, self._clock())

    def _refusal(self, name: str, limit: int, wait_s: float) -> OverloadedError:
        self.refused += 1
        return OverloadedError(f"this API key may have {limit} {name.replace('_', ' ')}", retry_after=max(1.0, wait_s))


class Hold:
    """One request's part of an account."""

    def __init__(self, account: Account) -> None:
        self._account, self._tokens = account, 0

    def take(self, tokens: int) -> None:
        """Count more tokens. Raises OverloadedError."""
        self._account.take(tokens)
        self._tokens += tokens

    def end(self, used: int) -> None:
        """The request has ended."""
        self._account.end(self._tokens, used)


def _per_minute(amount: int) -> Bucket | None:
    return Bucket(amount / 60.0, float(amount)) if amount else None
