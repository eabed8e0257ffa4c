"""A process that compiles grammars for another one: `python -m calstack.grammar.worker` speaks length-prefixed msgpack on its pipes.

Compiling some grammars takes for ever and cannot be interrupted from inside. So the process dies by a signal when a job has used up its
processor time, and by the allocator when it needs too much memory; whoever started it starts another one.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import struct
import sys
from typing import IO

import msgspec

from calstack.errors import CalstackError, RequestError
from calstack.grammar.matcher import Grammars
from calstack.grammar.source import GrammarSpec, grammar_source

__all__ = ["Answer", "Job", "Setup", "read_message", "write_message"]

_LENGTH = struct.Struct("<I")
_WALL = 10  # times the processor time: what a job may take on a busy machine


class Setup(msgspec.Struct, frozen=True, array_like=True):
    """The first message: the tokenizer, and what a job may use."""

    tokenizer_json: str
    vocab: int
    eos: tuple[int, ...]
    seconds: float
    memory_bytes: int


class Job(msgspec.Struct, frozen=True, array_like=True):
    """A constraint to turn into grammar text, or (kind None) such text; either is compiled."""

    kind: str | None
    text: str
    param: str


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """The checked text; or what the error says, with where and param."""

    source: str
    error: tuple[str, str, str | None] | None = None


def read_message(stream: IO[bytes]) -> bytes:
    """One message; empty at the end of the stream."""
    head = stream.read(_LENGTH.size)
    return stream.read(_LENGTH.unpack(head)[0]) if len(head) == _LENGTH.size else b""


def write_message(stream: IO[bytes], message: msgspec.Struct) -> None:
    """One message."""
    body = msgspec.msgpack.encode(message)
    stream.write(_LENGTH.pack(len(body)) + body)
    stream.flush()


def _answer(grammars: Grammars, job: Job) -> Answer:
    try:
        source = job.text if job.kind is None else grammar_source(GrammarSpec(job.kind, job.text, job.param))  # type: ignore[arg-type]
        grammars.matcher(source, param=job.param).mask()
    except RequestError as error:
        return Answer("", (error.what, error.where, error.param))
    except CalstackError as error:
        return Answer("", (error.what, error.where, job.param))
    except Exception as error:  # noqa: BLE001  whatever a foreign library raises is the grammar's fault
        return Answer("", (f"the grammar failed: {error}", f"$.{job.param}", job.param))
    return Answer(source)


def main() -> None:
    """Serve until the other side closes its pipe."""
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    setup = msgspec.msgpack.decode(read_message(stdin), type=Setup)
    grammars = Grammars(setup.tokenizer_json, vocab=setup.vocab, eos=setup.eos)
    held = int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmSize"))) << 10  # noqa: PTH123, SIM115
    resource.setrlimit(resource.RLIMIT_AS, (held + setup.memory_bytes, held + setup.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):
        os.nice(5)  # those who wait for a constraint have asked for the work; those who stream have not
    while body := read_message(stdin):
        signal.setitimer(signal.ITIMER_PROF, setup.seconds)
        signal.setitimer(signal.ITIMER_REAL, setup.seconds * _WALL)
        answer = _answer(grammars, msgspec.msgpack.decode(body, type=Job))
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        write_message(stdout, answer)


if __name__ == "__main__":
    main()
