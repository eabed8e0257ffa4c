"""Compiles constraints in processes of their own, so that a bad one is refused in bounded time and memory, whatever it is."""

from __future__ import annotations

import collections
import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence

import msgspec

from calstack.errors import NotInCalbin, RequestError
from calstack.grammar.source import GrammarSpec
from calstack.grammar.worker import Answer, Job, Setup, read_message, write_message

__all__ = ["CheckedGrammars"]

_REMEMBERED = 256  # texts known to compile
_TOO_LONG = {-signal.SIGPROF, -signal.SIGALRM}


class CheckedGrammars:
    """Checks constraints as the engine will build them. Safe to use from several threads; each that asks at once has its own process,
    which is kept for the next. A process is started with the first constraint.

    Args:
        tokenizer_json: the calbin's tokenizer.json.
        vocab: rows of the logits.
        eos: ids that end an output.
        seconds: processor time of one constraint.
        memory_bytes: what one may allocate.
    """

    def __init__(self, tokenizer_json: str, *, vocab: int, eos: Sequence[int], seconds: float = 3.0, memory_bytes: int = 1 << 30) -> None:
        self._setup = Setup(tokenizer_json, vocab, tuple(eos), seconds, memory_bytes)
        self._lock = threading.Lock()
        self._idle: list[subprocess.Popen[bytes]] = []
        self._busy: list[subprocess.Popen[bytes]] = []
        self._known: collections.OrderedDict[Job, str] = collections.OrderedDict()

    def source(self, spec: GrammarSpec) -> str:
        """The checked grammar text of a constraint.

        Raises:
            RequestError: it does not parse, is too large or too costly, or uses a keyword that is not supported; names it.
            NotInCalbin: no grammar can be kept with this tokenizer.
        """
        return self._done(Job(spec.kind, spec.text, spec.param))

    def check(self, source: str, param: str) -> None:
        """Raise as `source` does for grammar text that is made already."""
        self._done(Job(None, source, param))

    def close(self) -> None:
        """End the processes, also those that compile."""
        with self._lock:
            idle, self._idle = self._idle, []
            for process in self._busy:
                process.kill()
        for process in idle:
            _end(process)

    def _done(self, job: Job) -> str:
        with self._lock:
            if (known := self._known.get(job)) is not None:
                self._known.move_to_end(job)
                return known
        source = self._asked(job)
        with self._lock:
            self._known[job] = self._known[Job(None, source, job.param)] = source
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return source

    def _asked(self, job: Job) -> str:
        with self._process() as process:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                write_message(process.stdin, job)
                body = read_message(process.stdout)
            except OSError:
                body = b""
            if not body:
                raise _died(process.wait(), job.param)
        answer = msgspec.msgpack.decode(body, type=Answer)
        if answer.error is not None:
            what, where, param = answer.error
            raise RequestError(what, where=where, param=param)
        return answer.source

    @contextlib.contextmanager
    def _process(self) -> Iterator[subprocess.Popen[bytes]]:
        with self._lock:
            process = self._idle_one() or self._start()
            self._busy.append(process)
        try:
            yield process
        finally:
            with self._lock:
                self._busy.remove(process)
                alive = process.poll() is None
                if alive:
                    self._idle.append(process)
            if not alive:
                _end(process)

    def _idle_one(self) -> subprocess.Popen[bytes] | None:
        while self._idle:
            process = self._idle.pop()
            if process.poll() is None:
                return process
            _end(process)
        return None

    def _start(self) -> subprocess.Popen[bytes]:
        if not self._setup.eos:
            raise NotInCalbin("no grammar can be kept: the calbin names no end of sequence", where="manifest.model.eos_ids")
        process = subprocess.Popen(
            [sys.executable, "-m", "calstack.grammar.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt of the terminal is for the server
        )
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # a process that is gone shows in its answer
            write_message(process.stdin, self._setup)
        return process


def _died(code: int, param: str) -> RequestError:
    what = (
        "the grammar takes too long to compile" if code in _TOO_LONG else "the grammar needs too much memory, or this tokenizer takes none"
    )
    return RequestError(what, where=f"$.{param}", remedy="ask for less", param=param)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
