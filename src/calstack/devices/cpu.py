"""The cpu device: native kernels behind the device contract. Launches run on a thread pool inside; this class only converts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calstack.calbin.compat import Offer, check_fit
from calstack.calbin.manifest import NUMERICS, PACKED_LAYOUT
from calstack.calbin.reader import open_calbin
from calstack.devices.base import (
    BufferId,
    CalbinHandle,
    CallTime,
    ChipInfo,
    ChipMemory,
    Completion,
    DeviceInfo,
    DeviceStatus,
    KVMove,
    KVMoveKind,
    LaneOutput,
    Launch,
    OpenOptions,
    QueueFull,
    RowOutput,
    Ticket,
)
from calstack.devices.checks import Bounds, check_launch
from calstack.devices.cpu_load import build_calbin
from calstack.devices.machine import memory_bytes, usable_cores
from calstack.devices.writes import WriteTickets
from calstack.errors import ArtifactError, CalstackError, CancelledError, DeviceError, DeviceNeedsReset, DeviceRetryable, UsageError
from calstack.native import BoundError, QueueFullError
from calstack.native import CpuDevice as NativeDevice

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["OFFER", "CpuDevice"]

_MOVES = {KVMoveKind.COPY: 0, KVMoveKind.SAVE: 1, KVMoveKind.RESTORE: 2, KVMoveKind.CLEAR: 3}
_OUTCOMES: dict[int, type[CalstackError]] = {1: CancelledError, 2: DeviceRetryable, 3: DeviceNeedsReset, 4: DeviceError}
_MOST_BLOCKS = 1 << 24


OFFER = Offer(name="cpu", chips=16, packed_layouts=(PACKED_LAYOUT,), numerics=(NUMERICS,), dram_bytes=())


class CpuDevice:
    """See `devices.base.Device`. `extra` options: `isolate_chips=1` runs chips one at a time, each able to read only its own shard.

    A calbin of several chips runs with a thread team per chip.

    Raises:
        UsageError: when the instruction set is not usable here, or an option is not known.
    """

    def __init__(self, options: OpenOptions) -> None:
        extra = dict(options.extra)
        isolate = extra.pop("isolate_chips", "0") == "1"
        if extra:
            raise UsageError(f"unknown device option {next(iter(extra))!r}", where="cpu", remedy="the cpu device takes isolate_chips")
        threads = options.threads or usable_cores()
        try:
            self._native: NativeDevice | None = NativeDevice(
                threads, options.isa, options.queue_depth, options.strict, options.completion == "event", isolate
            )
        except (ValueError, RuntimeError) as error:
            raise UsageError(str(error), where="cpu", remedy="try another --isa, --threads or queue depth") from error
        self._strict = options.strict
        self._total = memory_bytes()
        self._writes = WriteTickets()
        self._bounds: dict[CalbinHandle, tuple[Bounds, dict[str, int]]] = {}
        self._info = DeviceInfo(
            name="cpu",
            isa=self._native.isa,
            chips=(ChipInfo(id=0, dram_bytes=self._total, sram_bytes=0),),
            link_gb_s=0.0,
            threads=threads,
            queue_depth=options.queue_depth,
            late_inputs=True,
        )

    def info(self) -> DeviceInfo:
        return self._info

    def load(self, calbin: Path, *, kv_blocks: int) -> CalbinHandle:
        native = self._open()
        opened = open_calbin(calbin)
        least = 1 if opened.manifest.kv.layers else 0
        if not least <= kv_blocks <= _MOST_BLOCKS:
            what = f"{kv_blocks} KV blocks, {least} to {_MOST_BLOCKS} can be reserved"
            raise DeviceError(what, where="cpu", remedy="choose another number")
        if opened.manifest.weightless:
            raise ArtifactError("holds no parameters (feature weightless)", where=str(calbin), remedy="compile the model with its weights")
        check_fit(opened.manifest, OFFER)
        handle = native.load(build_calbin(opened, kv_blocks))
        programs = {s.key: i for i, s in enumerate(opened.manifest.submodels)}
        self._bounds[handle] = Bounds.of(opened.manifest, kv_blocks, late_masks=True), programs
        return handle

    def unload(self, calbin: CalbinHandle) -> None:
        with _translated():
            self._open().unload(calbin)
        del self._bounds[calbin]

    def alloc(self, nbytes: int, *, pinned: bool = False) -> BufferId:
        if nbytes <= 0:
            raise DeviceError(f"a buffer of {nbytes} bytes", where="cpu", remedy="ask for at least one byte")
        try:
            return self._open().alloc(nbytes)
        except (MemoryError, TypeError) as error:
            raise DeviceRetryable(f"{nbytes} bytes cannot be reserved", where="cpu", remedy="ask for less") from error

    def free(self, buffer: BufferId) -> None:
        with _translated():
            self._open().free(buffer)

    def write(self, buffer: BufferId, data: bytes, offset: int = 0) -> Ticket:
        start = time.monotonic_ns()
        with _translated():
            self._open().write(buffer, offset, data)
        return self._writes.add(len(data), start, time.monotonic_ns())

    def read(self, buffer: BufferId, nbytes: int, offset: int = 0) -> bytes:
        with _translated():
            return self._open().read(buffer, offset, nbytes)

    def kv_move(self, calbin: CalbinHandle, moves: Sequence[KVMove]) -> list[bytes]:
        with _translated():
            return self._open().kv_move(calbin, [(_MOVES[m.kind], m.src, m.dst, m.data) for m in moves])

    def submit(self, launch: Launch) -> Ticket:
        native = self._open()
        known = self._bounds.get(launch.calbin)
        if known is None:
            raise DeviceError(f"calbin {launch.calbin} is not loaded", where="cpu", remedy="load it first")
        bounds, programs = known
        check_launch(launch, bounds, strict=self._strict)
        with _translated():
            return native.submit(launch.calbin, programs[launch.submodel], launch.lanes, launch.profile)

    def give_mask(self, ticket: Ticket, lane: int, mask: npt.NDArray[np.int32] | None) -> None:
        with _translated():
            self._open().give_mask(ticket, lane, None if mask is None else mask.view("uint32"))

    def wait(self, ticket: Ticket, timeout_s: float) -> Completion | None:
        if ticket < 0 and (written := self._writes.claim(ticket)) is not None:
            return written
        with _translated():
            result = self._open().wait(ticket, timeout_s)
        return None if result is None else _completion(ticket, result)

    def poll(self, ticket: Ticket) -> Completion | None:
        return self.wait(ticket, 0.0)

    def event_fd(self) -> int:
        return self._open().event_fd()

    def cancel(self, ticket: Ticket) -> bool:
        with _translated():
            return self._open().cancel(ticket)

    def memory(self) -> tuple[ChipMemory, ...]:
        parameters, kv, activations, buffers = self._open().memory()
        return (
            ChipMemory(
                id=0,
                used_bytes=parameters + kv + activations + buffers,
                total_bytes=self._total,
                parameter_bytes=parameters,
                kv_bytes=kv,
                activation_bytes=activations,
                buffer_bytes=buffers,
            ),
        )

    def status(self) -> DeviceStatus:
        if self._native is None:
            return DeviceStatus.CLOSED
        return DeviceStatus.BUSY if self._native.busy() else DeviceStatus.READY

    def reset(self) -> None:
        self._open().reset()

    def close(self) -> None:
        self._native = None  # the last reference: its destructor stops the threads
        self._bounds.clear()

    def _open(self) -> NativeDevice:
        if self._native is None:
            raise DeviceError("the device is closed", where="cpu", remedy="open it again")
        return self._native


class _translated:  # noqa: N801  (reads as a phrase; a generator context manager costs 1 us more per launch)
    """Turns the native module's errors into the contract's."""

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, CalstackError):
            return
        if isinstance(error, QueueFullError):
            raise QueueFull(str(error), where="cpu", remedy="wait for a ticket first") from error
        if isinstance(error, MemoryError):
            raise DeviceRetryable("memory for outputs cannot be had", where="cpu", remedy="ask for fewer logits") from error
        if isinstance(error, BoundError | TypeError | RuntimeError):
            raise DeviceError(str(error).splitlines()[0], where="cpu", remedy="see devices/base.py") from error


def _lane(result: tuple[Any, ...]) -> LaneOutput:
    (token, logprob, top_ids, top_logprobs), logits, before, embedding, scores = result
    rows = tuple(RowOutput(*row) for row in before)
    return LaneOutput(token, logprob, top_ids, top_logprobs, logits, rows, embedding, scores)


def _completion(ticket: Ticket, result: tuple[Any, ...]) -> Completion:
    outcome, message, times, lanes, calls = result
    submitted, started, finished, h2d, infer, d2h, h2d_bytes, d2h_bytes = times
    error = _OUTCOMES[outcome](message, where="cpu", remedy="submit the launch again") if outcome else None
    return Completion(
        ticket=ticket,
        lanes=tuple(map(_lane, lanes)),
        submitted_ns=submitted,
        started_ns=started,
        finished_ns=finished,
        h2d_ns=h2d,
        infer_ns=infer,
        d2h_ns=d2h,
        h2d_bytes=h2d_bytes,
        d2h_bytes=d2h_bytes,
        calls=tuple(CallTime(*call) for call in calls),
        error=error,
    )
