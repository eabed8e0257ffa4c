"""Grammars of requests, seen from the engine: who builds them (off the step path), and what a built one must be able to do.

The engine knows no text: whoever starts it brings a function that turns a grammar's text into a `Constraint`.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from calstack.errors import CalstackError, RequestError
from calstack.wire import Submit

__all__ = ["Built", "Constraint", "Constraints", "GrammarReady", "Mask", "ThreadedConstraints", "begin", "follow"]

Mask = npt.NDArray[np.int32]


class Constraint(Protocol):
    """Follows one output. Methods raise CalstackError when the grammar cannot be followed any more."""

    def mask(self) -> Mask:
        """Tokens allowed next: a new array `[ceil(vocab / 32)]`, bit set = allowed."""
        ...

    def consume(self, token: int) -> bool:
        """Step over a token; False when it is not allowed."""
        ...

    def peek(self, ids: Sequence[int]) -> list[Mask]:
        """The masks after each of `ids` in turn, for as many as are allowed and leave something to follow. Nothing is consumed."""
        ...

    def forced(self) -> list[int]:
        """Ids that are likely next, because the grammar leaves no other text; possibly none."""
        ...

    @property
    def finished(self) -> bool:
        """True when nothing but an end may follow."""
        ...


Built = Callable[[str], Constraint]  # grammar text -> a constraint at its start; raises CalstackError


@dataclasses.dataclass(frozen=True, slots=True)
class GrammarReady:
    """The grammar of `submit` is built and stands behind its known output ids; or `error` says why it cannot be."""

    submit: Submit
    constraint: Constraint | None = None
    mask: Mask | None = None  # for the next id; None when the constraint is finished
    error: CalstackError | None = None


class Constraints(Protocol):
    """Builds grammars while the engine goes on. `notify`, when set, is called from any thread when `take` has news."""

    notify: Callable[[], None] | None

    def begin(self, submit: Submit) -> None:
        """Start building; the result comes with a later `take`."""
        ...

    def take(self) -> list[GrammarReady]:
        """What has been built since the last call. Never blocks."""
        ...

    @property
    def pending(self) -> int:
        """Builds begun whose result has not been taken."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Until `take` has something, at most `timeout_s`."""
        ...

    def close(self) -> None:
        """Stop building."""
        ...


def begin(built: Built, submit: Submit) -> GrammarReady:
    """Build a request's grammar and walk it over the output ids that are known (of a resumed request)."""
    try:
        constraint = built(submit.grammar)
        follow(constraint, submit.output)
        return GrammarReady(submit, constraint, None if constraint.finished else constraint.mask())
    except CalstackError as error:
        return GrammarReady(submit, error=error)


def follow(constraint: Constraint, ids: Sequence[int]) -> None:
    """Step over ids. Raises RequestError at the first that the grammar does not allow."""
    for token in ids:
        if not constraint.consume(token):
            raise RequestError(f"the grammar does not allow token {token}", param="grammar")


class ThreadedConstraints:
    """Builds in a thread of its own, started with the first grammar. `load` runs there once and may take long.

    `notify` is called from that thread whenever a result has come.
    """

    def __init__(self, load: Callable[[], Built], notify: Callable[[], None] | None = None) -> None:
        self.notify = notify
        self._load = load
        self._todo: queue.SimpleQueue[Submit | None] = queue.SimpleQueue()
        self._done: list[GrammarReady] = []
        self._news = threading.Condition()
        self._thread: threading.Thread | None = None
        self._pending = 0

    def begin(self, submit: Submit) -> None:
        self._pending += 1
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
            self._thread.start()
        self._todo.put(submit)

    def take(self) -> list[GrammarReady]:
        if not self._pending:
            return []
        with self._news:
            done, self._done = self._done, []
        self._pending -= len(done)
        return done

    @property
    def pending(self) -> int:
        return self._pending

    def wait(self, timeout_s: float) -> None:
        with self._news:
            self._news.wait_for(lambda: bool(self._done), timeout_s)

    def close(self) -> None:
        if self._thread is not None:
            self._todo.put(None)
            self._thread.join(5.0)

    def _run(self) -> None:
        built: Built | None = None
        while (submit := self._todo.get()) is not None:
            try:
                built = built or self._load()
                ready = begin(built, submit)
            except Exception as error:  # noqa: BLE001  whatever a foreign library raises ends one request, not the thread
                known = error if isinstance(error, CalstackError) else RequestError(f"the grammar failed: {error}", param="grammar")
                ready = GrammarReady(submit, error=known)
            with self._news:
                self._done.append(ready)
                self._news.notify_all()
            if self.notify is not None:
                self.notify()
