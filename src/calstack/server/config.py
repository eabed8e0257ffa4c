"""What `serve` needs to know, as one frozen tree. The command line fills it; nothing edits it after start."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

from calstack.errors import UsageError

__all__ = ["AccessConfig", "EngineConfig", "LimitsConfig", "ListenConfig", "LogConfig", "ServeConfig"]

LogLevel = Literal["debug", "info", "warning", "error"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ListenConfig:
    """Where the public port is."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8080
    """TCP port; 0 takes a free one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the engine process is started with."""

    with_section: ClassVar[tuple[str, ...]] = ("command",)
    device: str = "cpu"
    """Name of the device in the registry."""
    isa: str = "auto"
    """Instruction set of the cpu device's kernels."""
    threads: int = 0
    """Kernel threads; 0 = one per core."""
    prefill_chunk: int = 0
    """Most prompt tokens of a launch; 0 = what the calbin allows."""
    kv_memory: int = 0
    """Bytes for the KV cache; 0 = enough for every lane at full context, within the device's memory."""
    start_timeout_s: float = 120.0
    """How long a start may take before it counts as failed."""
    stop_timeout_s: float = 5.0
    """How long the engine may take to end before it is killed."""
    restarts: int = 5
    """Failed starts in a row before the server gives up."""
    command: tuple[str, ...] = ()
    """Program and leading arguments that replace `python -m calstack engine`; empty = that one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """What a client may ask for."""

    max_queued_requests: int = 64
    """Choices that may wait beyond those the engine runs at once."""
    max_queued_tokens: int = 1 << 20
    """Prompt tokens that may wait."""
    max_body_bytes: int = 2 << 20
    """Largest request body."""
    max_json_depth: int = 64
    """Deepest nesting of a request body."""
    max_choices: int = 64
    """Most choices of a request (n x prompts)."""
    max_stops: int = 64
    """Most stop strings of a request."""
    max_stop_chars: int = 1024
    """Longest stop string, characters."""
    max_logit_bias: int = 4096
    """Most entries of logit_bias."""
    max_logprobs: int = 20
    """Largest top_logprobs."""
    template_seconds: float = 2.0
    """Longest time a chat template may run."""
    body_timeout_s: float = 30.0
    """Longest time a request body may take to come."""
    keepalive_s: float = 30.0
    """Silence in a stream after which a comment is sent."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AccessConfig:
    """Who may use the public port."""

    api_key_file: Path | None = None
    """File with the SHA-256 of an API key in hex per line; None = no key is asked for."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may read answers: exact ones, `localhost` for any port of this machine, `*` for all."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """Structured logs on stderr, one JSON object a line; prompts and answers never appear."""

    with_section: ClassVar[tuple[str, ...]] = ("level",)
    level: LogLevel = "info"
    """Least severe level that is written."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Configuration of `calstack serve`."""

    calbin: Path
    """The calbin's directory."""
    model: str = ""
    """Name clients use for the model; empty = the calbin's name."""
    grace_s: float = 30.0
    """How long running requests may go on after SIGTERM."""
    runtime_dir: Path | None = None
    """Directory (made with mode 0700) for the engine's socket; None = a fresh temporary one."""
    listen: ListenConfig = dataclasses.field(default_factory=ListenConfig)
    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    limits: LimitsConfig = dataclasses.field(default_factory=LimitsConfig)
    access: AccessConfig = dataclasses.field(default_factory=AccessConfig)
    log: LogConfig = dataclasses.field(default_factory=LogConfig)

    def check(self) -> None:
        """Raise UsageError naming the first value out of range. No number may be negative; some may not be 0, or have a most."""
        most = {"listen.port": 65535}
        for path, value in _numbers(self):
            good = value > 0 if path in _POSITIVE else value >= 0
            if not good or value > most.get(path, value):
                raise UsageError("is out of range", where=path, remedy="see docs/reference/configuration.md")


_POSITIVE = frozenset(["limits.max_queued_tokens", "limits.max_body_bytes", "limits.max_choices", "limits.max_json_depth"])


def _numbers(tree: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    for field in dataclasses.fields(tree):
        value = getattr(tree, field.name)
        if dataclasses.is_dataclass(value):
            yield from _numbers(value, f"{prefix}{field.name}.")
        elif isinstance(value, (int, float)):
            yield prefix + field.name, value
