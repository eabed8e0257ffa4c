"""Who may use the public port: API keys and origins of web pages."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from calstack.errors import UsageError
from calstack.server.accounts import Account, KeyLimits
from calstack.server.config import AccessConfig
from calstack.server.errors import AuthenticationError
from calstack.server.page import PAGES

__all__ = ["Access"]

_OPEN = frozenset(["/health", "/v1/health"])
_LOCAL = frozenset(["localhost", "127.0.0.1", "::1"])
_LINE = re.compile(r"(?:(?P<name>[\w.-]+)\s+)?(?:sha256:)?(?P<digest>[0-9a-f]{64})(?P<limits>(?:\s+\w+=\d{1,12})*)")
_MOST_KEYS = 10_000
_ALLOWED = (
    (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
    (b"access-control-allow-headers", b"authorization, content-type, x-api-key, x-request-id, anthropic-version"),
    (b"access-control-max-age", b"600"),
)


class Access:
    """Checks requests.

    Args:
        config: the key file holds a line per key: the SHA-256 of the key in hex, with a name before it and limits behind it if wanted.

    Raises:
        UsageError: when the key file cannot be read, holds no key, or holds something else.
    """

    def __init__(self, config: AccessConfig) -> None:
        self._keys = _read(config) if config.api_key_file is not None else None
        self._origins = frozenset(config.cors_origins)

    @property
    def refused(self) -> int:
        """Requests that were refused because their key has too much."""
        return sum(account.refused for _, account in self._keys or ())

    def check(self, path: str, headers: Iterable[tuple[bytes, bytes]]) -> Account | None:
        """Whose request it is; None when no key is asked for. Raises AuthenticationError unless the request may use `path`."""
        if self._keys is None or path in _OPEN or path in PAGES:
            return None
        found = dict(headers)
        given = found.get(b"authorization", b"")
        key = given[7:].strip() if given[:7].lower() == b"bearer " else found.get(b"x-api-key", b"")
        digest = hashlib.sha256(key).digest()
        matches = [account for known, account in self._keys if hmac.compare_digest(digest, known)]  # all of them: time tells nothing
        if not matches:
            raise AuthenticationError("the API key is missing or wrong", remedy="send Authorization: Bearer KEY")
        return matches[0]

    def cors(self, headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """Headers that let the page that asks read the answer; none for a page that may not."""
        origin = next((value for name, value in headers if name == b"origin"), b"")
        if not origin or not self._is_allowed(origin.decode("latin-1")):
            return []
        return [(b"access-control-allow-origin", origin), (b"vary", b"origin"), *_ALLOWED]

    def _is_allowed(self, origin: str) -> bool:
        if "*" in self._origins or origin in self._origins:
            return True
        if "localhost" not in self._origins:
            return False
        try:
            parts = urlsplit(origin)
            return parts.scheme in {"http", "https"} and parts.hostname in _LOCAL and not parts.username and parts.path == ""
        except ValueError:
            return False


def _read(config: AccessConfig) -> list[tuple[bytes, Account]]:
    path = config.api_key_file
    assert path is not None
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot be read: {error}", where=str(path), remedy="give a file of SHA-256 digests") from error
    defaults = KeyLimits(
        requests=config.key_requests,
        tokens=config.key_tokens,
        requests_per_minute=config.key_requests_per_minute,
        tokens_per_minute=config.key_tokens_per_minute,
    )
    keys = []
    for number, line in enumerate((line.split("#")[0].strip() for line in lines), 1):
        if not line:
            continue
        if (found := _LINE.fullmatch(line)) is None:
            raise UsageError("is not a SHA-256 digest", where=f"{path}:{number}", remedy="write what `printf %s KEY | sha256sum` prints")
        limits = _limits(found["limits"], defaults, f"{path}:{number}")
        keys.append((bytes.fromhex(found["digest"]), Account(found["name"] or found["digest"][:12], limits)))
    if not 0 < len(keys) <= _MOST_KEYS:
        raise UsageError(f"holds {len(keys)} keys", where=str(path), remedy=f"write 1 to {_MOST_KEYS}")
    return keys


def _limits(text: str, defaults: KeyLimits, where: str) -> KeyLimits:
    given = {name: int(value) for name, value in (word.split("=") for word in text.split())}
    known = [field.name for field in dataclasses.fields(KeyLimits)]
    for name in given:
        if name not in known:
            raise UsageError(f"{name} is not a limit", where=where, remedy=f"known are {', '.join(known)}")
    return dataclasses.replace(defaults, **given)
