"""Messages between the API process and the engine process: msgpack of these, behind a 4-byte little-endian length.

The engine process connects to a unix socket that the API process listens on. Token ids only; no text crosses.
All tokens of a step travel in one message.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from calstack.specs import SamplingParams

__all__ = [
    "MAX_MESSAGE_BYTES",
    "CalbinInfo",
    "Cancel",
    "ChipState",
    "DeviceAnswer",
    "DeviceCommand",
    "Drain",
    "Encode",
    "Encoded",
    "EngineFailed",
    "EngineMessage",
    "EngineStats",
    "ErrorValue",
    "Finish",
    "LaunchTimes",
    "Ready",
    "ServerMessage",
    "StatsRequest",
    "StepOutput",
    "Stop",
    "Submit",
    "TokenLogprob",
    "TokenOut",
    "Usage",
]

MAX_MESSAGE_BYTES = 64 << 20


class _Msg(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=False):
    pass


class _Value(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    pass


# --- server → engine ---------------------------------------------------------------------------------------------------------


class Submit(_Msg, frozen=True, kw_only=True):
    """One choice of a request. `output` is non-empty on resume: ids already delivered, the engine goes on after them."""

    request: str  # unique per choice, chosen by the server
    prompt: tuple[int, ...]
    output: tuple[int, ...] = ()
    max_tokens: int  # output limit, counting `output`
    sampling: SamplingParams
    seed: int
    choice: int = 0
    stop_ids: tuple[int, ...] = ()  # a sampled id among these ends the choice (finish "stop"); it is not delivered as text
    ignore_eos: bool = False
    min_tokens: int = 0  # output ids before which no stop id is sampled
    top_logprobs: int = -1
    prompt_logprobs: int = -1  # -1 none; n >= 0: score every prompt id but the first, with the n most likely ids
    priority: int = 0  # lower runs first
    deadline_ms: int = 0  # from arrival; 0 = none
    adapter: int = 0
    cache_salt: str = ""
    cache_prompt: bool = True
    grammar: str = ""  # what the output must match, as the text that grammar_source makes; "" = no constraint
    overflow: Literal["reject", "truncate", "shift"] = "reject"  # what happens when prompt and output outgrow the context
    keep: int = 0  # ids at the beginning that `shift` never drops
    cut: int = 0  # ids that the server dropped from the prompt to make it fit (`truncate`, `shift`)
    alone: bool = False  # run without batch mates (after two crashes)
    key: str = ""  # owner of the request, for fair shares; "" = everybody without one


class Encode(_Msg, frozen=True, kw_only=True):
    """Texts for an encoder; answered by one Encoded."""

    request: str  # unique, chosen by the server
    texts: tuple[tuple[int, ...], ...]
    second: tuple[int, ...] = ()  # per text where its second segment begins, 0 = it has none; empty = no text has one
    deadline_ms: int = 0  # from arrival; 0 = none


class Cancel(_Msg, frozen=True, kw_only=True):
    """Forget a request; answered by its Finish (reason "cancelled") unless it has ended already. Texts are forgotten without an answer."""

    request: str


class StatsRequest(_Msg, frozen=True, kw_only=True):
    """Ask for EngineStats."""


class Drain(_Msg, frozen=True, kw_only=True):
    """Finish what runs, refuse new work; the engine answers with its exit."""


class Stop(_Msg, frozen=True, kw_only=True):
    """Stop now."""


class DeviceCommand(_Msg, frozen=True, kw_only=True):
    """Something of the operations plane; answered by the DeviceAnswer with the same id. `value`: a power mode, a register's name."""

    id: int
    action: Literal["status", "reset", "dump", "power", "register"]
    value: str = ""


ServerMessage = Submit | Encode | Cancel | StatsRequest | DeviceCommand | Drain | Stop


# --- engine → server ---------------------------------------------------------------------------------------------------------


class ErrorValue(_Value, frozen=True, kw_only=True):
    """An error on the wire: `kind` is the class name in calstack.errors."""

    kind: str
    message: str
    param: str | None = None
    retry_after: float = 0.0


class CalbinInfo(_Value, frozen=True, kw_only=True):
    """What the server must know of the loaded calbin and device."""

    calbin: str
    device: str
    context: int  # most positions of a request (prompt + output)
    vocab: int
    max_lanes: int
    kv_blocks: int
    kv_block_positions: int
    submodels: tuple[str, ...]
    dram_total_bytes: int


class Ready(_Msg, frozen=True, kw_only=True):
    """The calbin is loaded and the engine takes work."""

    info: CalbinInfo


class TokenLogprob(_Value, frozen=True, kw_only=True):
    """Log-probability of the sampled id and of the most likely ids."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class Usage(_Value, frozen=True, kw_only=True):
    """Counts and times of one choice, given at its end."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    queue_ms: float
    prefill_ms: float
    decode_ms: float
    cut: int = 0  # prompt ids dropped before the start
    shifts: int = 0  # times the context was full and half of it dropped


class Finish(_Value, frozen=True, kw_only=True):
    """Exactly one end of a choice. `reason`: stop (a stop id, given in stop_id), length, cancelled, error."""

    reason: Literal["stop", "length", "cancelled", "error"]
    stop_id: int = -1
    error: ErrorValue | None = None
    usage: Usage | None = None


class TokenOut(_Value, frozen=True, kw_only=True):
    """New ids of one choice in this step (ids may be empty when it only finishes)."""

    request: str
    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None
    prompt_start: int = 0  # `prompt_logprobs` are of the prompt ids from here on; a range may come again after a restart
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


class Encoded(_Value, frozen=True, kw_only=True):
    """The one end of an Encode: per text what the encoder has of both, little-endian f32, or an error."""

    request: str
    embeddings: tuple[bytes, ...] = ()
    scores: tuple[bytes, ...] = ()
    error: ErrorValue | None = None
    queue_ms: float = 0.0


class LaunchTimes(_Value, frozen=True, kw_only=True):
    """One launch, for the histograms."""

    phase: Literal["prefill", "decode", "encode"]
    submodel: str
    rows: int  # rows computed
    useful_rows: int  # rows that belonged to a request
    infer_ms: float
    h2d_ms: float
    d2h_ms: float
    framework_ms: float


class StepOutput(_Msg, frozen=True, kw_only=True):
    """Everything one engine step gives: tokens of all choices and the launches completed."""

    tokens: tuple[TokenOut, ...]
    launches: tuple[LaunchTimes, ...] = ()
    encoded: tuple[Encoded, ...] = ()


class EngineStats(_Msg, frozen=True, kw_only=True):
    """A snapshot; counters since start, gauges now. `times_s` are the step ledger's labels (invariant 6).

    `counters` are named freely; the server gives some of them metrics of their own (server/enginemetrics.py).
    """

    lanes_used: int
    queued_requests: int
    queued_tokens: int
    running: int
    kv_blocks_used: int
    kv_blocks_total: int
    kv_wait_ms: float  # longest current wait for blocks
    dram_used_bytes: tuple[int, ...]  # per chip
    device_status: int  # index in DeviceStatus
    times_s: dict[str, float]  # infer, h2d, d2h, framework, idle
    counters: dict[str, int]


class ChipState(_Value, frozen=True, kw_only=True):
    """Memory of one chip now, bytes (see devices.base.ChipMemory)."""

    id: int
    used_bytes: int
    total_bytes: int
    parameter_bytes: int
    kv_bytes: int
    activation_bytes: int
    buffer_bytes: int


class DeviceAnswer(_Msg, frozen=True, kw_only=True):
    """The end of a DeviceCommand: `error`, or the device's state; `text` is the dump's path, the power mode or the register's value."""

    id: int
    error: ErrorValue | None = None
    device: str = ""
    status: str = ""
    chips: tuple[ChipState, ...] = ()
    text: str = ""


class EngineFailed(_Msg, frozen=True, kw_only=True):
    """The engine cannot go on; it exits after this."""

    error: ErrorValue


EngineMessage = Ready | StepOutput | EngineStats | DeviceAnswer | EngineFailed
