"""What the engine process is started with: its command line, and the private directory of its socket."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from calstack.errors import UsageError
from calstack.server.config import EngineConfig, ServeConfig

__all__ = ["engine_command", "runtime_directory"]

_SOCKET_PATH_LIMIT = 107  # bytes of sun_path, less the terminating zero
# Admission bounds the queue here; the engine's own bound is wider, because a burst reaches it before it has filled its lanes.
_SLACK_REQUESTS = 4096
_SLACK_TOKENS = 1 << 24


@contextlib.contextmanager
def runtime_directory(wanted: Path | None) -> Iterator[Path]:
    """A private directory whose socket paths fit into a sockaddr; removed at the end unless it was given."""
    if wanted is not None:
        if len(os.fsencode(wanted)) > _SOCKET_PATH_LIMIT - len("/engine-00000.sock"):
            raise UsageError("is too long for a socket path", where=str(wanted), remedy="take a shorter runtime_dir")
        wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield wanted
        return
    directory = Path(tempfile.mkdtemp(prefix="calstack-"))
    if len(os.fsencode(directory / "engine-00000.sock")) > _SOCKET_PATH_LIMIT:
        directory.rmdir()
        directory = Path(tempfile.mkdtemp(prefix="calstack-", dir="/tmp"))  # mode 0700
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def engine_command(config: ServeConfig, socket: Path) -> list[str]:
    """The engine process's command line; its words `calstack … engine` are what an operator greps for."""
    engine: EngineConfig = config.engine
    head = engine.command or (sys.executable, "-m", "calstack", "engine")
    options = {
        "--connect": str(socket),
        "--device": engine.device,
        "--isa": engine.isa,
        "--threads": str(engine.threads),
        "--prefill-chunk": str(engine.prefill_chunk),
        "--speculation": "lookup" if engine.speculation else "off",
        "--kv-memory": str(engine.kv_memory),
        "--max-queued-requests": str(config.limits.max_queued_requests + _SLACK_REQUESTS),
        "--max-queued-tokens": str(config.limits.max_queued_tokens + _SLACK_TOKENS),
    }
    if engine.dump_dir is not None:
        options |= {"--dump-dir": str(engine.dump_dir), "--dump-quota": str(engine.dump_bytes)}
    return [*head, str(config.calbin), *(word for option in options.items() for word in option)]
