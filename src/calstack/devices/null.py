"""The null device: the whole contract, no kernels and no weights.

It reads only a calbin's manifest. Each KV position remembers a running hash of the ids before it, so a sampled id depends on the
lane's whole content as it is read through its block table: a wrong block, a lost copy or a stale position changes the answer.
Time is a fixed cost per launch and row, on the machine's clock or on a virtual one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from calstack.calbin.manifest import Manifest
from calstack.clock import Clock, MonotonicClock
from calstack.devices.alarm import Alarm
from calstack.devices.base import (
    BufferId,
    CalbinHandle,
    ChipInfo,
    ChipMemory,
    Completion,
    DeviceInfo,
    DeviceStatus,
    KVMove,
    LaneInput,
    Launch,
    OpenOptions,
    QueueFull,
    Ticket,
    TokenFrom,
)
from calstack.devices.checks import check_launch
from calstack.devices.null_model import Job, Loaded, read_manifest
from calstack.devices.writes import WriteTickets
from calstack.errors import CancelledError, DeviceError, DeviceNeedsReset, UsageError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["NullDevice", "Script"]

Script = Callable[[LaneInput, int], int]  # (lane, hash of its content) -> sampled id

_OPTIONS = {"launch_us": 0, "row_us": 0, "dram_bytes": 16 << 30}


class NullDevice:
    """See `devices.base.Device`.

    Args:
        options: `extra` takes launch_us and row_us (cost of a launch, and of each row) and dram_bytes.
        clock: what time passes on; a VirtualClock is moved forward by `wait`.
        script: chooses sampled ids instead of the hash.

    Raises:
        UsageError: when an option is not known or no number.
    """

    def __init__(self, options: OpenOptions, *, clock: Clock | None = None, script: Script | None = None) -> None:
        extra = _numbers(options.extra)
        self._launch_ns, self._row_ns = extra["launch_us"] * 1000, extra["row_us"] * 1000
        self._clock = clock or MonotonicClock()
        self._script, self._strict = script, options.strict
        self._loaded: dict[CalbinHandle, Loaded] = {}
        self._queue: deque[Job] = deque()
        self._ended: dict[Ticket, Completion] = {}
        self._sampled: dict[Ticket, tuple[CalbinHandle, list[int]]] = {}
        self._buffers: dict[BufferId, bytearray] = {}
        self._writes = WriteTickets()
        self._next_ticket = self._next_handle = self._next_buffer = 1
        self._free_at = 0
        self._closed = False
        self._alarm = Alarm(real=isinstance(self._clock, MonotonicClock)) if options.completion == "event" else None
        self._info = DeviceInfo(
            name="null",
            isa="",
            chips=(ChipInfo(id=0, dram_bytes=extra["dram_bytes"], sram_bytes=0),),
            link_gb_s=0.0,
            threads=0,
            queue_depth=options.queue_depth,
            late_inputs=False,
        )

    def info(self) -> DeviceInfo:
        return self._info

    def load(self, calbin: Path, *, kv_blocks: int) -> CalbinHandle:
        self._open()
        manifest = read_manifest(calbin)
        if kv_blocks < (1 if manifest.kv.layers else 0):
            raise DeviceError(f"{kv_blocks} KV blocks", where="null", remedy="reserve at least one")
        handle = self._next_handle
        self._next_handle += 1
        self._loaded[handle] = Loaded(manifest, kv_blocks)
        return handle

    def manifest(self, calbin: CalbinHandle) -> Manifest:
        """The manifest of a loaded calbin."""
        return self._calbin(calbin).manifest

    def unload(self, calbin: CalbinHandle) -> None:
        self._calbin(calbin)
        self._settle()
        if any(job.launch.calbin == calbin for job in self._queue):
            raise DeviceError("a launch of the calbin is in flight", where="null", remedy="wait for it first")
        del self._loaded[calbin]

    def alloc(self, nbytes: int, *, pinned: bool = False) -> BufferId:
        self._open()
        if not 0 < nbytes <= self._info.chips[0].dram_bytes:
            raise DeviceError(f"a buffer of {nbytes} bytes", where="null", remedy="ask for less")
        self._buffers[self._next_buffer] = bytearray(nbytes)
        self._next_buffer += 1
        return self._next_buffer - 1

    def free(self, buffer: BufferId) -> None:
        self._range(buffer, 0, 0)
        del self._buffers[buffer]

    def write(self, buffer: BufferId, data: bytes, offset: int = 0) -> Ticket:
        self._range(buffer, offset, len(data))[offset : offset + len(data)] = data
        now = self._clock.now_ns()
        return self._writes.add(len(data), now, now)

    def read(self, buffer: BufferId, nbytes: int, offset: int = 0) -> bytes:
        return bytes(self._range(buffer, offset, nbytes)[offset : offset + nbytes])

    def kv_move(self, calbin: CalbinHandle, moves: Sequence[KVMove]) -> list[bytes]:
        loaded = self._calbin(calbin)
        for job in list(self._queue):
            self._run_until(job)
        return loaded.move(moves)

    def submit(self, launch: Launch) -> Ticket:
        self._open()
        loaded = self._calbin(launch.calbin)
        self._settle()
        check_launch(launch, loaded.bounds, strict=self._strict)
        self._check_sources(launch)
        if len(self._queue) >= self._info.queue_depth:
            raise QueueFull(f"the launch queue holds {len(self._queue)}", where="null", remedy="wait for a ticket first")
        now = self._clock.now_ns()
        rows = sum(lane.cur_len for lane in launch.lanes)
        start = max(now, self._free_at)
        self._free_at = start + self._launch_ns + rows * self._row_ns
        job = Job(self._next_ticket, launch, now, start, self._free_at)
        self._next_ticket += 1
        self._sampled[job.ticket] = launch.calbin, [0 if lane.emit else -1 for lane in launch.lanes]
        self._sampled.pop(job.ticket - 4 * self._info.queue_depth - 8, None)
        self._queue.append(job)
        self._settle()
        self._ring()
        return job.ticket

    def give_mask(self, ticket: Ticket, lane: int, mask: npt.NDArray[np.int32] | None) -> None:
        raise DeviceError("masks come with the launch", where="null", remedy="see DeviceInfo.late_inputs")

    def wait(self, ticket: Ticket, timeout_s: float) -> Completion | None:
        self._open()
        if (written := self._writes.claim(ticket)) is not None:
            return written
        self._settle()
        job = next((j for j in self._queue if j.ticket == ticket), None)
        if job is None and ticket not in self._ended:
            raise DeviceError(f"ticket {ticket} is not known or was claimed before", where="null", remedy="claim each ticket once")
        if job is not None and timeout_s > 0:
            self._sleep(min(job.end_ns, self._clock.now_ns() + int(timeout_s * 1e9)))
            self._settle()
        done = self._ended.pop(ticket, None)
        self._ring()
        return done

    def poll(self, ticket: Ticket) -> Completion | None:
        return self.wait(ticket, 0.0)

    def event_fd(self) -> int:
        return self._alarm.fd if self._alarm is not None else -1

    def cancel(self, ticket: Ticket) -> bool:
        self._settle()
        for job in self._queue:
            if job.ticket == ticket and job.start_ns > self._clock.now_ns():
                self._queue.remove(job)
                del self._sampled[ticket]
                self._ended[ticket] = job.failed(CancelledError("the launch was cancelled", where="null"), self._clock.now_ns())
                self._replan()
                return True
        return False

    def memory(self) -> tuple[ChipMemory, ...]:
        parameters = sum(c.manifest.target.chips[0].params_bytes for c in self._loaded.values())
        activations = sum(c.manifest.target.chips[0].activation_bytes for c in self._loaded.values())
        kv = sum(c.kv_bytes() for c in self._loaded.values())
        buffers = sum(len(b) for b in self._buffers.values())
        return (
            ChipMemory(
                id=0,
                used_bytes=parameters + activations + kv + buffers,
                total_bytes=self._info.chips[0].dram_bytes,
                parameter_bytes=parameters,
                kv_bytes=kv,
                activation_bytes=activations,
                buffer_bytes=buffers,
            ),
        )

    def status(self) -> DeviceStatus:
        if self._closed:
            return DeviceStatus.CLOSED
        self._settle()
        return DeviceStatus.BUSY if self._queue else DeviceStatus.READY

    def reset(self) -> None:
        self._open()
        now = self._clock.now_ns()
        for job in self._queue:
            self._ended[job.ticket] = job.failed(DeviceNeedsReset("the device was reset", where="null"), now)
        self._queue.clear()
        self._sampled.clear()
        self._free_at = now
        for loaded in self._loaded.values():
            loaded.clear()
        self._ring()

    def close(self) -> None:
        if not self._closed and self._alarm is not None:
            self._alarm.close()
        self._closed = True
        self._queue.clear()
        self._loaded.clear()
        self._buffers.clear()

    def _open(self) -> None:
        if self._closed:
            raise DeviceError("the device is closed", where="null", remedy="open it again")

    def _calbin(self, handle: CalbinHandle) -> Loaded:
        if handle not in self._loaded:
            raise DeviceError(f"calbin {handle} is not loaded", where="null", remedy="load it first")
        return self._loaded[handle]

    def _range(self, buffer: BufferId, offset: int, nbytes: int) -> bytearray:
        self._open()
        data = self._buffers.get(buffer)
        if data is None:
            raise DeviceError(f"buffer {buffer} does not exist", where="null", remedy="allocate it first")
        if offset < 0 or nbytes < 0 or offset + nbytes > len(data):
            raise DeviceError(f"range lies outside buffer {buffer}", where="null", remedy=f"it has {len(data)} bytes")
        return data

    def _check_sources(self, launch: Launch) -> None:
        for index, lane in enumerate(launch.lanes):
            source = lane.tokens
            if lane.cur_len == 0 or not isinstance(source, TokenFrom):
                continue
            calbin, tokens = self._sampled.get(source.ticket, (0, []))
            if calbin != launch.calbin or not 0 <= source.lane < len(tokens) or tokens[source.lane] == -1:
                raise DeviceError(
                    "its token's launch or lane is not known", where=f"lane {index}", remedy="name a recent launch that emits"
                )

    def _settle(self) -> None:
        """Run what ended by now, in order."""
        now = self._clock.now_ns()
        while self._queue and self._queue[0].end_ns <= now:
            job = self._queue.popleft()
            self._ended[job.ticket] = job.run(self._loaded[job.launch.calbin], self._sampled, self._script)

    def _run_until(self, job: Job) -> None:
        self._sleep(job.end_ns)
        self._settle()

    def _sleep(self, until_ns: int) -> None:
        advance = getattr(self._clock, "advance", None)
        remaining = until_ns - self._clock.now_ns()
        while remaining > 0:
            if advance is not None:
                advance(remaining)
            else:
                time.sleep(remaining / 1e9)
            remaining = until_ns - self._clock.now_ns()

    def _replan(self) -> None:
        """Launches behind a cancelled one move forward."""
        at = self._clock.now_ns()
        for job in self._queue:
            length = job.end_ns - job.start_ns
            job.start_ns = job.start_ns if job.start_ns <= at else max(at, job.submitted_ns)
            job.end_ns = at = job.start_ns + length
        self._free_at = at
        self._ring()

    def _ring(self) -> None:
        if self._alarm is not None:
            self._alarm.set(bool(self._ended), self._queue[0].end_ns if self._queue else 0)


def _numbers(extra: tuple[tuple[str, str], ...]) -> dict[str, int]:
    values = dict(_OPTIONS)
    for key, text in extra:
        if key not in values or not text.isdigit():
            raise UsageError(f"device option {key}={text} is not known", where="null", remedy=f"give numbers for {', '.join(values)}")
        values[key] = int(text)
    return values
