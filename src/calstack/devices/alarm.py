"""An event descriptor that becomes readable at a time: completion events for devices that only model time."""

from __future__ import annotations

import contextlib
import os
import threading
import time

__all__ = ["Alarm"]


class Alarm:
    """Readable when told so, or, on the machine's clock, once a monotonic time has come.

    Args:
        real: False where time moves only by calls, so that no thread is needed.
    """

    def __init__(self, *, real: bool) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._real, self._at_ns, self._stop = real, 0, False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def set(self, ready: bool, at_ns: int) -> None:
        """Readable now, or at monotonic `at_ns` (0 = never)."""
        with self._changed:
            self._at_ns = 0 if ready else at_ns
            if ready:
                os.eventfd_write(self.fd, 1)
                return
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.fd)
            if at_ns and self._real:
                self._start()
                self._changed.notify()

    def close(self) -> None:
        """Stop the thread and close the descriptor."""
        with self._changed:
            self._stop = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
        os.close(self.fd)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="null-alarm", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        with self._changed:
            while not self._stop:
                left = self._at_ns - time.monotonic_ns()
                if self._at_ns and left <= 0:
                    os.eventfd_write(self.fd, 1)
                    self._at_ns = 0
                self._changed.wait(left / 1e9 if self._at_ns else None)
