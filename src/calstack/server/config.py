"""What `serve` needs to know, as one frozen tree. The command line fills it; nothing edits it after start."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

from calstack.errors import UsageError

__all__ = ["AccessConfig", "EngineConfig", "LimitsConfig", "ListenConfig", "LogConfig", "OpsConfig", "ServeConfig", "TraceConfig"]

LogLevel = Literal["debug", "info", "warning", "error"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ListenConfig:
    """Where the public port is."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8080
    """TCP port; 0 takes a free one."""
    uds: Path | None = None
    """Unix socket to listen on instead of TCP."""
    tls_cert: Path | None = None
    """PEM file with the certificate and its chain; with it the port speaks TLS only."""
    tls_key: Path | None = None
    """PEM file with the certificate's key, unencrypted; None = it stands in the certificate's file."""
    max_connections: int = 1024
    """Most connections at once; more get a 503."""


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
    speculation: bool = False
    """Guess ids by what followed the same ids before, and check them in one launch; changes no answer."""
    kv_memory: int = 0
    """Bytes for the KV cache; 0 = enough for every lane at full context, within the device's memory."""
    start_timeout_s: float = 120.0
    """How long a start may take before it counts as failed."""
    stop_timeout_s: float = 5.0
    """How long the engine may take to end before it is killed."""
    restarts: int = 5
    """Failed starts in a row before the server gives up."""
    dump_dir: Path | None = None
    """Where the last launches are written when one fails and when an operator asks; they hold what users wrote. None = nowhere."""
    dump_bytes: int = 64 << 20
    """Most bytes of dumps kept there."""
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
    max_texts: int = 2048
    """Most texts of a request to an encoder."""
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
    max_head_bytes: int = 64 << 10
    """Largest head of a request."""
    max_head_fields: int = 100
    """Most header fields of a request."""
    head_timeout_s: float = 20.0
    """Longest time a request's head may take to come, from the connection's start or the first byte."""
    body_timeout_s: float = 30.0
    """Longest time a request body may take to come."""
    write_timeout_s: float = 60.0
    """How long a client may leave an answer's bytes waiting before it is cut off."""
    idle_timeout_s: float = 75.0
    """How long a connection may stay open after an answer without another request."""
    keepalive_s: float = 30.0
    """Silence in a stream after which a comment is sent."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AccessConfig:
    """Who may use the public port."""

    api_key_file: Path | None = None
    """File with a line per API key: its name (optional), its SHA-256 in hex, limits such as `requests=4`; None = no key is asked for."""
    key_requests: int = 0
    """Requests that one key may have at once, where its line says nothing (`requests=`); 0 = any number."""
    key_tokens: int = 0
    """Prompt and output tokens that one key may have at once (`tokens=`); 0 = any number."""
    key_requests_per_minute: int = 0
    """Requests of one key in a minute (`requests_per_minute=`); 0 = any number."""
    key_tokens_per_minute: int = 0
    """Prompt and output tokens of one key in a minute (`tokens_per_minute=`); 0 = any number."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may read answers: exact ones, `localhost` for any port of this machine, `*` for all."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpsConfig:
    """The operations plane: device state, reset, dumps, drain, log level; never on the public port."""

    with_section: ClassVar[tuple[str, ...]] = (
        "enabled", "socket", "port", "token_file", "viewers", "operators", "audit_file", "reads_per_s", "registers",
    )  # fmt: skip
    enabled: bool = True
    """Whether there is one."""
    socket: Path | None = None
    """Unix socket to listen on; None = `ops.sock` in the runtime directory."""
    port: int = 0
    """TCP port on 127.0.0.1 to listen on too, for holders of tokens; 0 = none."""
    token_file: Path | None = None
    """File with a line per token: its name, `viewer` or `operator`, and its SHA-256 in hex; None = no tokens."""
    viewers: tuple[str, ...] = ()
    """Users (names or ids) who may look, through the unix socket."""
    operators: tuple[str, ...] = ()
    """Users who may also act; the server's own user and root always may."""
    audit_file: Path | None = None
    """Append-only log of what was done; None = `audit.jsonl` in the runtime directory, which goes with it if that is temporary."""
    reads_per_s: float = 10.0
    """Requests a second of one caller; more are a 429."""
    registers: tuple[str, ...] = ()
    """Names of device registers that may be read."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """Structured logs on stderr, one JSON object a line; answers never appear, prompts only when asked for."""

    with_section: ClassVar[tuple[str, ...]] = ("level", "prompts")
    level: LogLevel = "info"
    """Least severe level that is written."""
    prompts: bool = False
    """Whether request bodies (their first 64 KiB) stand in the log lines of generating routes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig:
    """OpenTelemetry spans; needs the extra `calstack[otel]`."""

    with_section: ClassVar[tuple[str, ...]] = ("endpoint", "service", "ratio", "interval_s")
    endpoint: str = ""
    """OTLP/HTTP address of a collector, such as `http://localhost:4318/v1/traces`; empty = no spans."""
    service: str = "calstack"
    """Name of the service in the spans."""
    ratio: float = 1.0
    """Share of requests that are traced, 0 to 1; a caller's own decision comes first."""
    interval_s: float = 5.0
    """How often spans are sent."""


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
    """Directory (made with mode 0700) for the sockets; None = a fresh temporary one."""
    listen: ListenConfig = dataclasses.field(default_factory=ListenConfig)
    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    limits: LimitsConfig = dataclasses.field(default_factory=LimitsConfig)
    access: AccessConfig = dataclasses.field(default_factory=AccessConfig)
    ops: OpsConfig = dataclasses.field(default_factory=OpsConfig)
    log: LogConfig = dataclasses.field(default_factory=LogConfig)
    trace: TraceConfig = dataclasses.field(default_factory=TraceConfig)

    def check(self) -> None:
        """Raise UsageError naming the first value out of range. No number may be negative; some may not be 0, or have a most."""
        most = {"listen.port": 65535, "ops.port": 65535, "trace.ratio": 1}
        for path, value in _numbers(self):
            good = value > 0 if path in _POSITIVE else value >= 0
            if not good or value > most.get(path, value):
                raise UsageError("is out of range", where=path, remedy="see docs/reference/configuration.md")


_POSITIVE = frozenset(
    [
        "limits.max_queued_tokens",
        "limits.max_body_bytes",
        "limits.max_choices",
        "limits.max_texts",
        "limits.max_json_depth",
        "ops.reads_per_s",
        "trace.interval_s",
    ]
)


def _numbers(tree: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    for field in dataclasses.fields(tree):
        value = getattr(tree, field.name)
        if dataclasses.is_dataclass(value):
            yield from _numbers(value, f"{prefix}{field.name}.")
        elif isinstance(value, (int, float)):
            yield prefix + field.name, value
