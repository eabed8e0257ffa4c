"""Requests that come and go at given turns of an in-process engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from calstack.engine.driver import Driver
from calstack.wire import Cancel, Finish, Submit

MOST_TURNS = 100_000
Message = Submit | Cancel


def play(
    driver: Driver, script: Mapping[int, Sequence[Message]], *, most_turns: int = 100_000
) -> tuple[dict[str, list[int]], dict[str, Finish]]:
    """Send `script[n]` when n tokens have been made in all; run until idle. Returns ids and ends by request."""
    ids: dict[str, list[int]] = {}
    ends: dict[str, Finish] = {}
    waiting = sorted(script.items())
    made = 0
    for _ in range(MOST_TURNS):
        due: list[Message] = []
        while waiting and (waiting[0][0] <= made or (driver.core.idle and not due)):
            due.extend(waiting.pop(0)[1])
        result = driver.turn(due)
        for out in result.tokens:
            ids.setdefault(out.request, []).extend(out.ids)
            made += len(out.ids)
            if out.finish is not None:
                assert out.request not in ends
                ends[out.request] = out.finish
        if driver.core.idle and not waiting:
            return ids, ends
        if not result.tokens and not driver.core.idle:
            driver.wait(5.0)
    raise AssertionError("the engine did not become idle")
