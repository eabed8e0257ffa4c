"""Calls over chips. Programs of one chip are what they are; splitting columns and experts over two is later work."""

from __future__ import annotations

from collections.abc import Sequence

from calstack.calbin.program import Call
from calstack.errors import UnsupportedError

__all__ = ["partition"]


def partition(calls: Sequence[Call], *, chips: int) -> tuple[tuple[Call, ...], ...]:
    """One stream of calls per chip.

    Raises:
        UnsupportedError: for more than one chip.
    """
    if chips != 1:
        raise UnsupportedError(f"programs over {chips} chips are not written yet", where="partition", remedy="choose a target of one chip")
    return (tuple(calls),)
