"""Progress on stderr: bars on a terminal, one line per stage elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from calstack.progress import Progress

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

__all__ = ["show_progress"]


@contextlib.contextmanager
def show_progress() -> Iterator[Progress]:
    """A Progress that draws until the block ends."""
    if sys.stderr.isatty():
        with _bars() as bars:
            shown = BarProgress(bars)
            yield shown
            shown.done()
    else:
        lines = LineProgress()
        yield lines
        lines.done()


class BarProgress:
    """One bar per stage."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._task: TaskID | None = None

    def stage(self, name: str, total: int = 0) -> None:
        self.done()
        self._task = self._bars.add_task(name, total=total or None)

    def advance(self, units: int = 1) -> None:
        if self._task is not None:
            self._bars.advance(self._task, units)

    def done(self) -> None:
        """The current stage has ended."""
        if self._task is not None:
            task = self._bars.tasks[self._task]
            total = task.total or 1
            self._bars.update(self._task, total=total, completed=total)
            self._task = None


class LineProgress:
    """A line when a stage has ended, with its seconds: for logs and pipes."""

    def __init__(self) -> None:
        self._name, self._start = "", 0.0

    def stage(self, name: str, total: int = 0) -> None:
        self.done()
        self._name, self._start = name, time.monotonic()

    def advance(self, units: int = 1) -> None:
        pass

    def done(self) -> None:
        """The current stage has ended."""
        if self._name:
            click.echo(f"{self._name}: {time.monotonic() - self._start:.1f} s", err=True)
            self._name = ""


def _bars() -> Bars:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True))
