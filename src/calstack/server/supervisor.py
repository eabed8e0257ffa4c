"""Starts the engine process, keeps it running, and carries the journal into the next one when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import itertools
import logging
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from calstack.errors import CalstackError, DeadlineError, UnavailableError
from calstack.server.config import ServeConfig
from calstack.server.errors import error_of
from calstack.server.journal import Entry, Journal
from calstack.server.launch import engine_command
from calstack.server.link import EngineLink
from calstack.server.texts import TextBook, TextEntry
from calstack.wire import (
    CalbinInfo,
    Cancel,
    DeviceAnswer,
    DeviceCommand,
    Encode,
    Encoded,
    EngineFailed,
    EngineMessage,
    EngineStats,
    ErrorValue,
    Finish,
    LaunchTimes,
    Ready,
    ServerMessage,
    StatsRequest,
    StepOutput,
    Stop,
)

__all__ = ["EngineState", "Supervisor"]

logger = logging.getLogger(__name__)

_WATCH_S = 10.0
_HANG_S = 60.0  # an engine with work that says nothing for so long, asked to, is taken for dead


DeviceAction = Literal["status", "reset", "dump", "power", "register"]


class EngineState(enum.Enum):
    """Where the engine process stands."""

    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"  # given up
    STOPPED = "stopped"


class Supervisor:
    """One engine process at a time. All methods run on the event loop.

    Args:
        config: what to start.
        journal: the accepted choices; the supervisor gives them to the engine and ends those that cannot go on.
        on_launches: takes the times of completed launches.
        on_ready: called each time an engine is ready.
        directory: private; sockets go there.
    """

    def __init__(
        self,
        config: ServeConfig,
        journal: Journal,
        *,
        on_launches: Callable[[tuple[LaunchTimes, ...]], None],
        on_ready: Callable[[CalbinInfo], None],
        directory: Path,
    ) -> None:
        self._config, self._journal, self._directory = config, journal, directory
        self._texts = TextBook()
        self._on_launches, self._on_ready = on_launches, on_ready
        self.state = EngineState.LOADING
        self.info: CalbinInfo | None = None
        self.error: CalstackError | None = None  # why the engine is down
        self.restarts = 0
        self.stats: EngineStats | None = None
        self.changed = asyncio.Event()  # set at every change of `state`
        self._stop = asyncio.Event()
        self._link: EngineLink | None = None
        self._lost = asyncio.Event()
        self._heard = 0.0
        self._stats_waiters: list[asyncio.Future[EngineStats]] = []
        self._numbers = itertools.count(1)
        self._commands: dict[int, asyncio.Future[DeviceAnswer]] = {}
        self._task: asyncio.Task[None] | None = None

    # --- life ------------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin; `state` says when the engine is ready."""
        self._task = asyncio.create_task(self._run(), name="engine-supervisor")

    async def stop(self) -> None:
        """End the engine process, by force if it does not go within `stop_timeout_s`. Open choices end with an error."""
        self._stop.set()
        self._send(Stop())
        if self._link is None:  # nobody to tell
            self._lost.set()
        if self._task is not None:
            await self._task
        self._set(EngineState.STOPPED)
        self._fail_all(UnavailableError("the server stops"))

    # --- work ------------------------------------------------------------------------------------------------------------------

    def submit(self, entry: Entry) -> None:
        """Give a choice to the engine now, or to the next one as soon as it is ready."""
        if self.state is EngineState.READY:
            entry.sent = True
            self._send(entry.resumed())

    def cancel(self, request: str) -> None:
        """Tell the engine to forget a choice; its end comes through the journal. Without an engine it ends here."""
        entry = next((e for e in self._journal if e.submit.request == request), None)
        if entry is None:
            return
        if entry.sent:
            self._send(Cancel(request=request))
        else:
            self._journal.end(request, Finish(reason="cancelled"))

    def replace(self, request: str, name: str, kept: int, ids: Sequence[int]) -> None:
        """Go on with a choice under a new name, after its first `kept` ids and `ids`; later ids of the old one are forgotten."""
        if (entry := self._journal.fork(request, name, kept, ids)) is not None:
            if entry.sent:
                self._send(Cancel(request=request))
            self.submit(entry)

    def encode(self, message: Encode) -> asyncio.Future[Encoded]:
        """Give texts to the engine now, or to the next one as soon as it is ready; the answer, or the CalstackError it ends with."""
        entry = self._texts.accept(message)
        self._send_texts(entry)
        return entry.answer

    def forget_texts(self, request: str) -> None:
        """Nobody waits for a request's texts any more; without effect when it has been answered."""
        if (entry := self._texts.forget(request)) is not None and entry.sent:
            self._send(Cancel(request=request))

    def _send_texts(self, entry: TextEntry) -> None:
        if self.state is EngineState.READY:
            entry.sent = True
            self._send(entry.message)

    async def fresh_stats(self, timeout_s: float = 0.5) -> EngineStats | None:
        """The engine's counters now, or the last known ones when it does not answer in time."""
        if self.state is EngineState.READY:
            waiter: asyncio.Future[EngineStats] = asyncio.get_running_loop().create_future()
            self._stats_waiters.append(waiter)
            self._send(StatsRequest())
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(waiter, timeout_s)
        return self.stats

    def ask_stats(self) -> EngineStats | None:
        """The last known counters; newer ones are asked for and come later."""
        self._send(StatsRequest())
        return self.stats

    async def command(self, action: DeviceAction, value: str = "", *, timeout_s: float = 30.0) -> DeviceAnswer:
        """Let the engine do something to its device.

        Raises:
            UnavailableError: when no engine is ready, or it ends before it has answered.
            DeadlineError: when no answer comes within `timeout_s`; it may still be done later.
            CalstackError: what the engine answers.
        """
        if self.state is not EngineState.READY:
            raise UnavailableError("the engine is not ready")
        number = next(self._numbers)
        waiter = self._commands[number] = asyncio.get_running_loop().create_future()
        self._send(DeviceCommand(id=number, action=action, value=value))
        try:
            answer: DeviceAnswer = await asyncio.wait_for(waiter, timeout_s)
        except TimeoutError as error:
            raise DeadlineError(f"the engine did not answer within {timeout_s:g} s", where=action) from error
        finally:
            del self._commands[number]
        if answer.error is not None:
            raise error_of(answer.error)
        return answer

    # --- the process -----------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        failed_starts = 0
        while not self._stop.is_set():
            was_ready = await self._life(self._directory / f"engine-{self.restarts}.sock")
            failed_starts = 0 if was_ready else failed_starts + 1
            if self._stop.is_set() or self._hopeless(failed_starts, was_ready):
                break
            self.restarts += 1
            self._set(EngineState.LOADING)
            await self._pause(min(5.0, 0.1 * 2**failed_starts))
        if not self._stop.is_set():
            self._give_up()

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), seconds)

    async def _life(self, path: Path) -> bool:
        """One engine process from start to end; whether it became ready."""
        self._lost.clear()
        server = await asyncio.get_running_loop().create_unix_server(self._accept, path=str(path), backlog=1)
        process = await self._spawn(path)
        ended = asyncio.create_task(process.wait())
        try:
            await self._watch(ended)
        finally:
            was_ready = self.state is EngineState.READY
            server.close()
            await _end_process(process, self._config.engine.stop_timeout_s if was_ready and self._stop.is_set() else 0.5)
            await ended
            self._disconnected(process.returncode, was_ready)
        return was_ready

    async def _spawn(self, path: Path) -> asyncio.subprocess.Process:
        command = engine_command(self._config, path)
        logger.info("starting the engine", extra={"command": command})
        return await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL, stdout=sys.stderr.fileno())

    def _accept(self) -> EngineLink:
        self._heard = time.monotonic()
        self._link = EngineLink(self._message, self._link_lost)
        return self._link

    async def _watch(self, ended: asyncio.Task[int]) -> None:
        """Return when the process has ended, its connection is gone, it did not become ready in time, or it hangs."""
        lost = asyncio.create_task(self._lost.wait())
        deadline = time.monotonic() + self._config.engine.start_timeout_s
        try:
            while not (ended.done() or lost.done()):
                await asyncio.wait({ended, lost}, timeout=_WATCH_S, return_when=asyncio.FIRST_COMPLETED)
                if self.state is EngineState.LOADING and time.monotonic() > deadline:
                    self.error = UnavailableError(f"the engine was not ready after {self._config.engine.start_timeout_s:g} s")
                    return
                if self._hangs():
                    self.error = UnavailableError(f"the engine said nothing for {_HANG_S:g} s")
                    return
        finally:
            lost.cancel()

    def _hangs(self) -> bool:
        if self.state is not EngineState.READY or not (len(self._journal) or len(self._texts)):
            self._heard = time.monotonic()
            return False
        self._send(StatsRequest())
        return time.monotonic() - self._heard > _HANG_S

    def _hopeless(self, failed_starts: int, was_ready: bool) -> bool:
        first = not was_ready and self.info is None
        final = first and self.error is not None and not self.error.retryable
        return final or failed_starts > self._config.engine.restarts

    def _give_up(self) -> None:
        self.error = self.error or UnavailableError("the engine process does not start")
        logger.error("giving up on the engine", extra={"error": self.error.line()})
        self._set(EngineState.FAILED)
        self._fail_all(self.error)

    def _disconnected(self, code: int | None, was_ready: bool) -> None:
        self._link = None
        for waiter in self._commands.values():
            if not waiter.done():
                waiter.set_exception(UnavailableError("the engine process ended"))
        if self._stop.is_set():
            return
        logger.error("the engine process ended", extra={"exit_code": code, "error": self.error.line() if self.error else None})
        self.error = self.error or UnavailableError(f"the engine process ended with code {code}")
        self._set(EngineState.LOADING)
        if was_ready:
            error = UnavailableError("the engine process died several times while it served this request")
            self._texts.crashed(error)
            for entry in self._journal.crashed():
                self._end_with(entry, error)

    # --- messages --------------------------------------------------------------------------------------------------------------

    def _message(self, message: EngineMessage) -> None:
        self._heard = time.monotonic()
        match message:
            case StepOutput():
                self._step(message)
            case EngineStats():
                self._take_stats(message)
            case DeviceAnswer():
                if (waiter := self._commands.get(message.id)) is not None and not waiter.done():
                    waiter.set_result(message)
            case Ready():
                self._ready(message.info)
            case EngineFailed():
                self.error = error_of(message.error)

    def _step(self, step: StepOutput) -> None:
        for out in step.tokens:
            self._journal.record(out)
        for encoded in step.encoded:
            self._texts.record(encoded)
        if step.launches:
            self._on_launches(step.launches)

    def _take_stats(self, stats: EngineStats) -> None:
        self.stats = stats
        waiters, self._stats_waiters = self._stats_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(stats)

    def _ready(self, info: CalbinInfo) -> None:
        self.info, self.error = info, None
        self._on_ready(info)
        self._set(EngineState.READY)
        for entry in self._journal:
            self.submit(entry)
        for texts in self._texts:
            self._send_texts(texts)

    def _link_lost(self, error: Exception | None) -> None:
        if error is not None and self.error is None:
            self.error = UnavailableError(f"the connection to the engine broke: {error}")
        self._lost.set()

    def _send(self, message: ServerMessage) -> None:
        if self._link is not None:
            self._link.send(message)

    def _set(self, state: EngineState) -> None:
        self.state = state
        self.changed.set()
        self.changed = asyncio.Event()

    def _fail_all(self, error: CalstackError) -> None:
        self._texts.fail_all(error)
        for entry in self._journal:
            self._end_with(entry, error)

    def _end_with(self, entry: Entry, error: CalstackError) -> None:
        retry_after = getattr(error, "retry_after", 0.0)
        value = ErrorValue(kind=type(error).__name__, message=error.what, retry_after=retry_after)
        self._journal.end(entry.submit.request, Finish(reason="error", error=value))


async def _end_process(process: asyncio.subprocess.Process, grace_s: float) -> None:
    """Wait a little, then end a process that is still there."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), grace_s)
    with contextlib.suppress(ProcessLookupError):
        if process.returncode is None:
            process.kill()
