"""The device contract: what loads calbins and runs launches. Everything above speaks to hardware through this file only.

A device is asynchronous: `submit` returns at once with a ticket (or raises QueueFull), launches run in submission order, and
`wait` / `poll` give a completion with its times. Methods are called from one thread (the engine's); a device may have threads inside.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from calstack.errors import DeviceRetryable
from calstack.specs import DrawKey, SamplingParams

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = [
    "BufferId",
    "CalbinHandle",
    "CallTime",
    "ChipInfo",
    "ChipMemory",
    "Completion",
    "Device",
    "DeviceControls",
    "DeviceInfo",
    "DeviceStatus",
    "KVMove",
    "KVMoveKind",
    "LaneInput",
    "LaneOutput",
    "Launch",
    "LogitRows",
    "OpenOptions",
    "QueueFull",
    "RowOutput",
    "Ticket",
    "TokenFrom",
]

Ticket = int
CalbinHandle = int
BufferId = int


class QueueFull(DeviceRetryable):
    """The launch queue is at its depth; wait for a ticket, then submit again."""


class LogitRows(enum.IntEnum):
    """Which rows of a lane come back as logits."""

    NONE = 0
    LAST = 1
    ALL = 2


class DeviceStatus(enum.StrEnum):
    """What a device says of itself; the numbers of `calrt_device_status` follow this order, from 0."""

    READY = "ready"
    BUSY = "busy"
    NEEDS_RESET = "needs_reset"
    FAILED = "failed"
    CLOSED = "closed"


@dataclasses.dataclass(frozen=True, slots=True)
class TokenFrom:
    """A lane's input token is the id that `lane` of the earlier launch `ticket` sampled; it never visits the host."""

    ticket: Ticket
    lane: int


@dataclasses.dataclass(frozen=True, slots=True)
class LaneInput:
    """One lane of a launch. An empty lane is left out of the launch's list or has cur_len 0."""

    past_len: int  # CSR past_kv_cur_seq_len: positions already in the KV cache
    cur_len: int  # CSR cur_seq_len: tokens this launch adds; 0 = lane empty
    blocks: Sequence[int]  # KV block ids, in position order, covering past_len + cur_len positions
    tokens: Sequence[int] | TokenFrom  # cur_len ids from the host, or one id from an earlier launch
    emit: bool = False  # sample a token after the lane's last row
    sampling: SamplingParams | None = None  # required with emit
    draw: DrawKey | None = None  # required with emit unless greedy
    prompt_history: Sequence[int] = ()  # prompt ids, only when sampling.needs_history
    output_history: Sequence[int] = ()  # output ids so far, only when sampling.needs_history;
    # with a TokenFrom source the device appends that token itself
    mask: npt.NDArray[np.int32] | None = None  # token bitmask, ceil(vocab / 32) words, bit set = allowed; None = all allowed;
    # with emit_rows > 1 one row of words for each
    late_mask: bool = False  # the mask comes with `give_mask`, after submit; only on a device with late inputs, with emit
    top_logprobs: int = -1  # -1 none; n >= 0: log-probability of the sampled id and of the n most likely ids
    logits: LogitRows = LogitRows.NONE
    adapter: int = 0  # reserved: adapter slot, 0 = none
    emit_rows: int = 1  # with emit, of the last rows those that a token is sampled after; more than 1 (at most MOST_EXTEND) only on
    # an `extend` submodel. Row j of them draws output index draw.index + j, with the ids before it in the launch in its history
    types: Sequence[int] = ()  # of an encoder's lane: cur_len segments; none given = all 0

    def with_tokens(self, tokens: Sequence[int] | TokenFrom, output_history: Sequence[int]) -> LaneInput:
        """The lane with another source and history. `dataclasses.replace` would do, at ten times the cost, in every step."""
        return LaneInput(
            self.past_len, self.cur_len, self.blocks, tokens, self.emit, self.sampling, self.draw, self.prompt_history, output_history,
            self.mask, self.late_mask, self.top_logprobs, self.logits, self.adapter, self.emit_rows, self.types,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """One asynchronous execution of a submodel."""

    calbin: CalbinHandle
    submodel: str  # key in the manifest
    lanes: tuple[LaneInput, ...]
    profile: bool = False  # fill Completion.calls
    probe: bool = False  # fill Completion.prints; a device that cannot leaves them empty


@dataclasses.dataclass(frozen=True, slots=True)
class RowOutput:
    """What was sampled after one row."""

    token: int
    logprob: float  # as in LaneOutput
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class LaneOutput:
    """What a lane gives back; lanes that asked for nothing have token -1 and empty arrays."""

    token: int  # sampled id, or -1 when emit was False
    logprob: float  # of the sampled id; nan unless top_logprobs >= 0
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]
    logits: npt.NDArray[np.float32] | None  # [rows, vocab]
    before: tuple[RowOutput, ...] = ()  # of the sampled rows before the last
    embedding: npt.NDArray[np.float32] | None = None  # [hidden], of an encoder that pools
    scores: npt.NDArray[np.float32] | None = None  # [labels], of an encoder that classifies


@dataclasses.dataclass(frozen=True, slots=True)
class CallTime:
    """Per-call profile: start relative to the launch's infer start."""

    name: str
    layer: int
    start_ns: int
    ns: int
    bytes: int
    ops: int  # multiply and add counted each


@dataclasses.dataclass(frozen=True, slots=True)
class Completion:
    """The end of a launch. Times are raw launch times in ns; `error` is set instead of `lanes` on failure."""

    ticket: Ticket
    lanes: tuple[LaneOutput, ...]  # same order as the launch's lanes
    submitted_ns: int  # monotonic clock
    started_ns: int
    finished_ns: int
    h2d_ns: int
    infer_ns: int
    d2h_ns: int
    h2d_bytes: int
    d2h_bytes: int
    calls: tuple[CallTime, ...] = ()
    prints: tuple[
        npt.NDArray[np.uint64], ...
    ] = ()  # per chip [calls, rows]: hash of what each call wrote for each row, whatever the others
    error: Exception | None = None  # a DeviceError


class KVMoveKind(enum.StrEnum):
    """What `kv_move` does to blocks."""

    COPY = "copy"  # block src -> block dst
    SAVE = "save"  # block src -> host bytes
    RESTORE = "restore"  # host bytes -> block dst
    CLEAR = "clear"  # give the memory of block dst back


@dataclasses.dataclass(frozen=True, slots=True)
class KVMove:
    """One move of whole KV blocks, ordered with launches."""

    kind: KVMoveKind
    src: int = -1
    dst: int = -1
    data: bytes = b""


@dataclasses.dataclass(frozen=True, slots=True)
class ChipInfo:
    """One chip of a device, bytes."""

    id: int
    dram_bytes: int
    sram_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class ChipMemory:
    """Memory of one chip right now, bytes. used = parameters + KV committed + activations + buffers."""

    id: int
    used_bytes: int
    total_bytes: int
    parameter_bytes: int
    kv_bytes: int
    activation_bytes: int
    buffer_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What a device is: checked against a calbin's compatibility field at load."""

    name: str
    isa: str  # e.g. "avx512_vnni", "avx2", "portable", "reference"; "" where it has no meaning
    chips: tuple[ChipInfo, ...]
    link_gb_s: float  # host link, GB/s one way
    threads: int
    queue_depth: int
    late_inputs: bool
    driver: str = ""
    firmware: str = ""
    packed_layouts: tuple[str, ...] = ("n16.v1",)
    numerics: tuple[int, ...] = (1,)


@dataclasses.dataclass(frozen=True, slots=True)
class OpenOptions:
    """How to open a device. Unknown keys in `extra` are refused by the device."""

    threads: int = 0  # 0 = one per usable core
    isa: str = ""  # force an instruction set (cpu device); "" = best
    queue_depth: int = 4
    completion: str = "event"  # "event" | "poll"
    strict: bool = False  # check shapes, ranges and NaN in every launch
    extra: tuple[tuple[str, str], ...] = ()


class Device(Protocol):
    """The contract. Errors raised are DeviceError subclasses (retryable, needs reset, fatal) or ArtifactError from `load`."""

    def info(self) -> DeviceInfo:
        """Fixed facts; valid for the life of the device."""
        ...

    def load(self, calbin: Path, *, kv_blocks: int) -> CalbinHandle:
        """Map a sealed calbin's parameters, build its programs, reserve address space for `kv_blocks` KV blocks
        (committed on first write). Several calbins may be loaded. Raises ArtifactError when it does not fit."""
        ...

    def unload(self, calbin: CalbinHandle) -> None:
        """Drop a calbin and all its memory; no launch of it may be in flight."""
        ...

    def alloc(self, nbytes: int, *, pinned: bool = False) -> BufferId:
        """A device buffer, counted in `memory()` until freed."""
        ...

    def free(self, buffer: BufferId) -> None:
        """Free a buffer; an unknown id is a DeviceError."""
        ...

    def write(self, buffer: BufferId, data: bytes, offset: int = 0) -> Ticket:
        """Host to device; the data is taken before return."""
        ...

    def read(self, buffer: BufferId, nbytes: int, offset: int = 0) -> bytes:
        """Device to host, after everything submitted before."""
        ...

    def kv_move(self, calbin: CalbinHandle, moves: Sequence[KVMove]) -> list[bytes]:
        """Apply moves in order, after everything submitted before; returns the bytes of each SAVE."""
        ...

    def submit(self, launch: Launch) -> Ticket:
        """Queue a launch and return at once (inputs are taken before return). Raises QueueFull, or DeviceError when the
        launch breaks a bound (shape, block id, length): then nothing was queued."""
        ...

    def give_mask(self, ticket: Ticket, lane: int, mask: npt.NDArray[np.int32] | None) -> None:
        """The mask of a lane submitted with `late_mask` (None: all allowed). Everything of the launch but that lane's sampler runs
        without it; a launch whose masks do not come within the device's bound ends with DeviceRetryable. Ignored when the launch has
        ended or the lane waits for none. A device without late inputs raises DeviceError."""
        ...

    def wait(self, ticket: Ticket, timeout_s: float) -> Completion | None:
        """The ticket's completion, or None after `timeout_s`. A completion is given once."""
        ...

    def poll(self, ticket: Ticket) -> Completion | None:
        """As wait with no time-out."""
        ...

    def event_fd(self) -> int:
        """A file descriptor that becomes readable when a completion is ready (eventfd semantics), or -1."""
        ...

    def cancel(self, ticket: Ticket) -> bool:
        """Drop a queued launch; False when it runs or has ended. A dropped ticket completes with a CancelledError."""
        ...

    def memory(self) -> tuple[ChipMemory, ...]:
        """Bytes per chip right now."""
        ...

    def status(self) -> DeviceStatus:
        """What the device says of itself; cheap."""
        ...

    def reset(self) -> None:
        """Back to READY with calbins still loaded; KV contents and queued launches are lost."""
        ...

    def close(self) -> None:
        """Stop threads and free everything; idempotent."""
        ...


@runtime_checkable
class DeviceControls(Protocol):
    """What a device may offer an operator beside the contract; one that has none of it does not implement this."""

    def power_modes(self) -> tuple[str, ...]:
        """Names of the power modes; empty when there is no choice."""
        ...

    def set_power_mode(self, mode: str) -> None:
        """Take one of `power_modes()`. Raises DeviceError when the device refuses."""
        ...

    def read_register(self, name: str) -> int:
        """A register's value now. Raises UsageError for a name that the device does not have; there is no writing."""
        ...
