"""The engine process: the shell around the core. It sleeps on the socket, the device's event and signals, and nothing else.

A device without an event descriptor is waited for in short sleeps inside the device.
"""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from calstack.engine.assemble import calbin_info
from calstack.engine.controls import Controls
from calstack.engine.core import CoreEvent
from calstack.engine.driver import Driver
from calstack.engine.link import ServerLink
from calstack.engine.result import StepResult, error_value
from calstack.errors import CalstackError
from calstack.wire import DeviceCommand, Drain, EngineFailed, Ready, ServerMessage, StatsRequest, StepOutput, Stop

__all__ = ["EngineProcess"]

_LONGEST_SLEEP_S = 1.0
_DUMPED_FAILURES = 3  # launches that fail for good and are written down
_POLL_S = 0.002  # longest wait inside a device that has no event descriptor


class EngineProcess:
    """Serves one connection until it is told to stop, has drained, or the server is gone."""

    def __init__(self, driver: Driver, link: ServerLink, *, dump: Callable[[str], Path | None] | None = None) -> None:
        """`dump` writes the flight recorder down: when the device is lost, when a launch fails for good, and on SIGUSR1."""
        self._dump, self._dump_wanted, self._failures = dump, False, 0
        self._driver, self._link = driver, link
        self._controls = Controls(driver.runtime, dump)
        self._selector = selectors.DefaultSelector()
        self._event_fd = driver.runtime.device.event_fd()
        self._wake_read, self._wake_write = socket.socketpair()
        self._stopping = False
        self._terms = 0
        self._signals = False
        for sock in (self._wake_read, self._wake_write):
            sock.setblocking(False)
        if driver.constraints is not None:
            driver.constraints.notify = self._wake
        self._interest = selectors.EVENT_READ
        self._selector.register(link.sock, self._interest)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        if self._event_fd >= 0:
            self._selector.register(self._event_fd, selectors.EVENT_READ)

    def run(self) -> int:
        """The exit code: 0 after a stop, a drain or the server's end; a device's error code when it is lost."""
        try:
            self._link.send(Ready(info=calbin_info(self._driver)))
            gc.collect()
            gc.freeze()  # what is loaded stays: collections on the step path need not look at it
            self._loop()
        except CalstackError as error:
            self._link.send(EngineFailed(error=error_value(error)))
            if self._dump is not None:
                self._dump(error.line())
            return error.exit_code
        finally:
            self._link.finish()
            self._close()
        return 0

    def install_signals(self) -> None:
        """SIGTERM drains, a second one stops; SIGINT is left to the server. Only the main thread may call this."""
        self._signals = True
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._on_term)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, self._on_usr1)

    def _wake(self) -> None:
        """From any thread: look for news now."""
        with contextlib.suppress(OSError):  # full: a wake is under way; closed: nobody sleeps
            self._wake_write.send(b"\0")

    def _close(self) -> None:
        if self._signals:
            signal.set_wakeup_fd(-1)
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()

    def _on_term(self, number: int, frame: FrameType | None) -> None:
        self._terms += 1

    def _on_usr1(self, number: int, frame: FrameType | None) -> None:
        self._dump_wanted = True

    def _dump_if_due(self) -> None:
        """On demand, and at the first launches that fail for good (not at each: a bad request may repeat them)."""
        failures = self._driver.core.counters["failed_launches"]
        failed = self._failures < failures <= _DUMPED_FAILURES
        self._failures = failures
        if self._dump is not None and (failed or self._dump_wanted):
            self._dump("a launch failed" if failed else "on demand")
        self._dump_wanted = False

    def _loop(self) -> None:
        messages: Sequence[ServerMessage] = ()
        while True:
            result = self._driver.turn(self._events(messages))
            if result.tokens or result.ended or result.encoded:
                launches = tuple(times for _, times in result.ended)
                self._link.send(StepOutput(tokens=result.tokens, launches=launches, encoded=result.encoded))
            if any(isinstance(message, StatsRequest) for message in messages):
                self._link.send(self._driver.stats())
            for message in messages:
                if isinstance(message, DeviceCommand):
                    self._link.send(self._controls.run(message))
            self._dump_if_due()
            if self._over():
                return
            messages = self._link.receive() if self._sleep(result) else ()

    def _events(self, messages: Sequence[ServerMessage]) -> list[CoreEvent]:
        events: list[CoreEvent] = []
        for message in messages:
            if isinstance(message, Stop):
                self._stopping = True
            elif not isinstance(message, (StatsRequest, DeviceCommand)):
                events.append(message)
        if self._terms and not self._driver.core.draining:
            events.append(Drain())
        return events

    def _over(self) -> bool:
        drained = self._driver.core.draining and self._driver.core.idle
        return self._link.lost or self._stopping or self._terms > 1 or drained

    def _sleep(self, result: StepResult) -> bool:
        """Until a message, a completion, a signal, or the time that the core or runtime asked for; whether there are messages."""
        wake = self._driver.next_wake_ns(result)
        now = self._driver.clock.now_ns()
        timeout = _LONGEST_SLEEP_S if wake is None else min(max((wake - now) / 1e9, 0.0), _LONGEST_SLEEP_S)
        if self._event_fd < 0 and self._driver.runtime.in_flight:
            self._driver.wait(min(timeout, _POLL_S))
            timeout = 0.0
        interest = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._link.pending else 0)
        if interest != self._interest:
            self._selector.modify(self._link.sock, interest)
            self._interest = interest
        news = False
        for key, mask in self._selector.select(timeout):
            news |= self._ready(key, mask)
        return news

    def _ready(self, key: selectors.SelectorKey, mask: int) -> bool:
        """See to what is ready; whether messages have come."""
        if key.fileobj is self._link.sock:
            if mask & selectors.EVENT_WRITE:
                self._link.flush()
            return bool(mask & selectors.EVENT_READ)
        if key.fileobj is self._wake_read:
            self._wake_read.recv(64)
        else:
            os.read(key.fd, 8)  # resets the event; the completions themselves are collected in the next turn
        return False
