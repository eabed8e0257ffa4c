"""Who may use the operations plane, as what: users of this machine through the unix socket, holders of tokens anywhere."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import hmac
import os
import pwd
import re
from collections.abc import Iterable
from pathlib import Path

from calstack.errors import OverloadedError, UsageError
from calstack.server.bucket import Bucket
from calstack.server.config import OpsConfig
from calstack.server.errors import AuthenticationError, ForbiddenError

__all__ = ["Caller", "Gate", "Role"]

_LINE = re.compile(r"(?P<name>[\w.-]{1,64})\s+(?P<role>viewer|operator)\s+(?:sha256:)?(?P<digest>[0-9a-f]{64})")
_BURST = 20.0


class Role(enum.IntEnum):
    """What a caller may do; an operator may look too."""

    VIEWER = 1
    OPERATOR = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: `uid:1000` or `token:NAME`."""

    name: str
    role: Role

    def need(self, role: Role) -> None:
        """Raise ForbiddenError unless the caller has the role."""
        if self.role < role:
            raise ForbiddenError(f"{self.name} is a {self.role.name.lower()}", remedy=f"this takes an {role.name.lower()}")


class Gate:
    """Knows callers and how much each asks.

    Raises:
        UsageError: for a user that does not exist, a token file that cannot be used, or a TCP port without tokens.
    """

    def __init__(self, config: OpsConfig) -> None:
        self._users = {_uid(user): Role.VIEWER for user in config.viewers}
        self._users |= {_uid(user): Role.OPERATOR for user in config.operators}
        self.others = bool(self._users)
        self._users |= {0: Role.OPERATOR, os.geteuid(): Role.OPERATOR}
        self._tokens = _read(config.token_file) if config.token_file is not None else []
        if config.port and not self._tokens:
            raise UsageError("has no tokens to ask for", where="ops.port", remedy="set ops.token_file, or use the unix socket")
        self._rate = config.reads_per_s
        self._buckets: dict[str, Bucket] = {}

    def admit(self, peer: int | None, headers: Iterable[tuple[bytes, bytes]], now: float) -> Caller:
        """The caller.

        Args:
            peer: user at the other end of the unix socket; None over TCP.
            headers: of the request; a token in them decides alone.
            now: seconds of a monotonic clock.

        Raises:
            AuthenticationError: when it is nobody known.
            OverloadedError: when it asks too often; unknown callers count as one.
        """
        caller = self._caller(peer, headers)
        name = caller.name if caller is not None else ""
        bucket = self._buckets.setdefault(name, Bucket(self._rate, max(_BURST, self._rate)))
        if wait := bucket.wait_s(1.0, now):
            raise OverloadedError("too many requests", retry_after=wait)
        bucket.take(1.0, now)
        if caller is None:
            raise AuthenticationError("no valid token, and no user who may", remedy="send Authorization: Bearer TOKEN")
        return caller

    def _caller(self, peer: int | None, headers: Iterable[tuple[bytes, bytes]]) -> Caller | None:
        given = next((value for name, value in headers if name == b"authorization"), None)
        if given is not None:
            digest = hashlib.sha256(given[7:].strip() if given[:7].lower() == b"bearer " else b"").digest()
            matches = [caller for known, caller in self._tokens if hmac.compare_digest(digest, known)]
            return matches[0] if matches else None
        role = self._users.get(peer) if peer is not None else None
        return Caller(f"uid:{peer}", role) if role is not None else None


def _uid(user: str) -> int:
    try:
        return int(user) if user.isascii() and user.isdigit() else pwd.getpwnam(user).pw_uid
    except KeyError as error:
        raise UsageError(
            "there is no such user", where=user, remedy="name users of this machine in ops.viewers and ops.operators"
        ) from error


def _read(path: Path) -> list[tuple[bytes, Caller]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot be read: {error}", where=str(path), remedy="give a file of NAME ROLE SHA-256") from error
    tokens = []
    for number, line in enumerate((line.split("#")[0].strip() for line in lines), 1):
        if not line:
            continue
        if (found := _LINE.fullmatch(line)) is None:
            raise UsageError("is not NAME ROLE SHA-256", where=f"{path}:{number}", remedy="roles are viewer and operator")
        tokens.append((bytes.fromhex(found["digest"]), Caller(f"token:{found['name']}", Role[found["role"].upper()])))
    if not tokens:
        raise UsageError("holds no token", where=str(path), remedy="write a line NAME ROLE SHA-256")
    return tokens
