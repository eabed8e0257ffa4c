"""A device that computes nothing but keeps KV contents: every id is derived from all that a lane may legally depend on.

Each KV cell remembers the token and position written to it. A sampled id is a hash of the lane's whole KV contents read through
its block table, of the sampling values, the draw key and the histories: any mix-up of blocks, positions, histories or keys shows.
Time passes only with the clock.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from calstack.clock import Clock
from calstack.devices.base import (
    ChipInfo,
    ChipMemory,
    Completion,
    DeviceInfo,
    DeviceStatus,
    KVMove,
    KVMoveKind,
    LaneInput,
    LaneOutput,
    Launch,
    LogitRows,
    QueueFull,
    RowOutput,
    Ticket,
    TokenFrom,
)
from calstack.engine.constraints import Constraint
from calstack.errors import CancelledError, DeviceError, DeviceFatal
from calstack.runtime.facts import CalbinFacts, Extent
from calstack.specs import DrawKey, SamplingParams


def sample(
    cells: Sequence[tuple[int, int]], lane_sampling: SamplingParams, draw: DrawKey | None, history: tuple[tuple[int, ...], ...], vocab: int
) -> int:
    """The id a lane with these KV cells (position, token) samples."""
    key = None if lane_sampling.greedy else draw
    text = repr((tuple(cells), dataclasses.astuple(_values(lane_sampling)), key and (key.seed, key.choice, key.index), history))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") % vocab


@dataclasses.dataclass
class _Values:
    temperature: float
    top_k: int
    repetition: float


def _values(s: SamplingParams) -> _Values:
    return _Values(s.temperature, s.top_k, s.repetition_penalty)


def masked(token: int, mask: npt.NDArray[np.int32] | None, vocab: int) -> int:
    """The id that a mask makes of a sampled one."""
    if mask is None:
        return token
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab])
    return int(allowed[token % len(allowed)])


def alone(
    prompt: Sequence[int], sampling: SamplingParams, seed: int, choice: int, count: int, vocab: int, grammar: Constraint | None = None,
    shift: tuple[int, int] | None = None,
) -> list[int]:  # fmt: skip
    """The ids a request must get whatever happens around it; `shift`: (context, ids kept) of one that outgrows the context."""
    out: list[int] = []
    window = [(id_, False) for id_ in prompt]  # (id, whether it is output)
    for index in range(count):
        cells = [(place, id_) for place, (id_, _) in enumerate(window)]
        ids, outs = tuple(i for i, new in window if not new), tuple(i for i, new in window if new)
        token = sample(
            cells, sampling, DrawKey(seed=seed, choice=choice, index=index), (ids, outs) if sampling.needs_history else ((), ()), vocab
        )
        out.append(masked(token, grammar.mask() if grammar else None, vocab))
        window.append((out[-1], True))
        if shift is not None and len(window) == shift[0]:
            context, keep = shift
            del window[keep : keep + (context - keep) // 2]
        if grammar is not None:
            assert grammar.consume(out[-1])
            if grammar.finished:
                break
    return out


@dataclasses.dataclass
class _Job:
    ticket: Ticket
    launch: Launch
    submitted: int
    error: Exception | None = None


class FakeDevice:
    """Runs launches in order on the given clock. `faults`: errors to end the next launches with (None = let it run)."""

    def __init__(self, facts: CalbinFacts, clock: Clock, *, row_ns: int = 100_000, base_ns: int = 1_000_000, queue_depth: int = 4,
        late: bool = True,
    ) -> None:  # fmt: skip
        self.facts, self.clock, self.row_ns, self.base_ns, self.depth = facts, clock, row_ns, base_ns, queue_depth
        self.late = late
        self._masks: dict[tuple[Ticket, int], npt.NDArray[np.int32] | None] = {}
        self.faults: deque[Exception | None] = deque()
        self.submit_faults: deque[Exception | None] = deque()
        self.launches: list[Launch] = []
        self.max_pending = 0
        self.resets = 0
        self.poison = -1  # a launch that brings this token from the host fails
        self._subs = {s.key: s for s in facts.submodels}
        self._cells: dict[tuple[int, int], tuple[int, int]] = {}
        self._blocks = 0
        self._queue: deque[_Job] = deque()
        self._ended: dict[Ticket, Completion] = {}
        self._ids: dict[Ticket, list[int]] = {}
        self._next: Ticket = 0
        self._free_at = 0

    def info(self) -> DeviceInfo:
        return DeviceInfo(
            name="fake", isa="", chips=(ChipInfo(0, 1 << 30, 0),), link_gb_s=1.0, threads=1, queue_depth=self.depth, late_inputs=self.late
        )

    def load(self, calbin: Path, *, kv_blocks: int) -> int:
        self._blocks = kv_blocks
        return 1

    def unload(self, calbin: int) -> None:
        self._cells.clear()

    def alloc(self, nbytes: int, *, pinned: bool = False) -> int:
        return 0

    def free(self, buffer: int) -> None: ...

    def write(self, buffer: int, data: bytes, offset: int = 0) -> Ticket:
        return -1

    def read(self, buffer: int, nbytes: int, offset: int = 0) -> bytes:
        return b""

    def kv_move(self, calbin: int, moves: Sequence[KVMove]) -> list[bytes]:
        for move in moves:
            assert move.kind is KVMoveKind.CLEAR
            self._cells = {k: v for k, v in self._cells.items() if k[0] != move.dst}
        return []

    def submit(self, launch: Launch) -> Ticket:
        if self.submit_faults:
            fault = self.submit_faults.popleft()
            if fault is not None:
                raise fault
        self._advance()
        if len(self._queue) >= self.depth:
            raise QueueFull("full")
        self._check(launch)
        ticket = self._next
        self._next += 1
        self.launches.append(launch)
        self._queue.append(_Job(ticket, launch, self.clock.now_ns()))
        self.max_pending = max(self.max_pending, len(self._queue))
        return ticket

    def give_mask(self, ticket: Ticket, lane: int, mask: npt.NDArray[np.int32] | None) -> None:
        assert self.late
        self._advance()
        job = next((j for j in self._queue if j.ticket == ticket), None)
        if job is not None:
            assert job.launch.lanes[lane].late_mask
            self._masks[ticket, lane] = mask

    def wait(self, ticket: Ticket, timeout_s: float) -> Completion | None:
        advance = getattr(self.clock, "advance", None)
        if advance is not None and ticket not in self._ended and any(j.ticket == ticket for j in self._queue):
            for _ in range(100_000):
                self._advance()
                if ticket in self._ended:
                    break
                advance(self.base_ns)
        return self.poll(ticket)

    def poll(self, ticket: Ticket) -> Completion | None:
        self._advance()
        return self._ended.pop(ticket, None)

    def event_fd(self) -> int:
        return -1

    def cancel(self, ticket: Ticket) -> bool:
        self._advance()
        for job in list(self._queue)[1:]:
            if job.ticket == ticket:
                self._queue.remove(job)
                self._ended[ticket] = self._completion(job, (), self.clock.now_ns(), CancelledError("dropped"))
                return True
        return False

    def memory(self) -> tuple[ChipMemory, ...]:
        return (ChipMemory(0, 0, 1 << 30, 0, 0, 0, 0),)

    def status(self) -> DeviceStatus:
        return DeviceStatus.BUSY if self._queue else DeviceStatus.READY

    def reset(self) -> None:
        self.resets += 1
        self._queue.clear()
        self._ended.clear()
        self._cells.clear()
        self._masks.clear()

    def close(self) -> None: ...

    # --- inside ---

    def _check(self, launch: Launch) -> None:
        sub = self._subs.get(launch.submodel)
        if sub is None:
            raise DeviceError(f"no submodel {launch.submodel}")
        extents = [Extent(lane.past_len, lane.cur_len) for lane in launch.lanes]
        if not sub.fits(extents) or sum(e.cur for e in extents) > self.facts.max_tokens_per_launch:
            raise AssertionError(f"a launch breaks the constraints: {launch}")
        for lane in launch.lanes:
            self._check_lane(lane)

    def _check_lane(self, lane: LaneInput) -> None:
        assert self.facts.blocks_for(lane.past_len + lane.cur_len) <= len(lane.blocks) <= self.facts.blocks_for(self.facts.context)
        assert len(lane.prompt_history) + len(lane.output_history) <= self.facts.context
        assert len(set(lane.blocks)) == len(lane.blocks)
        assert all(0 <= b < self._blocks for b in lane.blocks)
        if isinstance(lane.tokens, TokenFrom):
            assert lane.cur_len == 1
            assert lane.tokens.ticket in self._ids or any(j.ticket == lane.tokens.ticket for j in self._queue)
        else:
            assert len(lane.tokens) == lane.cur_len
            assert all(0 <= t < self.facts.vocab for t in lane.tokens)
        assert not lane.emit or lane.sampling is not None
        assert 1 <= lane.emit_rows <= lane.cur_len or not lane.emit
        assert lane.emit_rows == 1 or not lane.late_mask
        assert not lane.late_mask or (self.late and lane.emit and lane.mask is None)

    def _advance(self) -> None:
        now = self.clock.now_ns()
        while self._queue:
            job = self._queue[0]
            rows = sum(lane.cur_len for lane in job.launch.lanes)
            end = max(job.submitted, self._free_at) + self.base_ns + rows * self.row_ns
            if end > now or any(lane.late_mask and (job.ticket, i) not in self._masks for i, lane in enumerate(job.launch.lanes)):
                return
            end = max(end, self._free_at)
            self._queue.popleft()
            self._free_at = end
            self._run(job, end)

    def _run(self, job: _Job, end: int) -> None:
        error = self.faults.popleft() if self.faults else None
        if error is None and self.poison >= 0 and any(self._sees(lane, self.poison) for lane in job.launch.lanes):
            error = DeviceError("a poisoned token")
        if error is None:
            try:
                lanes = tuple(self._lane(job.ticket, i, lane) for i, lane in enumerate(job.launch.lanes))
            except KeyError as missing:
                lanes, error = (), DeviceFatal(f"read before write: {missing}")
        else:
            lanes = ()
        self._ended[job.ticket] = self._completion(job, lanes, end, error)

    @staticmethod
    def _sees(lane: LaneInput, token: int) -> bool:
        return not isinstance(lane.tokens, TokenFrom) and token in lane.tokens

    def _lane(self, ticket: Ticket, index: int, lane: LaneInput) -> LaneOutput:
        source = lane.tokens
        tokens = [self._ids[source.ticket][source.lane]] if isinstance(source, TokenFrom) else list(source)
        size = self.facts.block_positions
        for i, token in enumerate(tokens):
            position = lane.past_len + i
            self._cells[lane.blocks[position // size], position % size] = (position, token)
        count = lane.emit_rows if lane.emit else 0
        ids = [self._row(ticket, index, lane, tokens, row) for row in range(count)]
        self._ids.setdefault(ticket, []).append(ids[-1] if ids else -1)
        logits = None
        if lane.logits is not LogitRows.NONE:
            rows = lane.cur_len if lane.logits is LogitRows.ALL else 1
            logits = np.zeros((rows, self.facts.vocab), np.float32)
        wanted = lane.top_logprobs >= 0
        top = tuple(range(max(lane.top_logprobs, 0)))
        rows_out = [RowOutput(token, -0.5 if wanted else float("nan"), top, tuple(-1.0 for _ in top)) for token in ids or [-1]]
        last = rows_out[-1]
        return LaneOutput(last.token, last.logprob, last.top_ids, last.top_logprobs, logits, tuple(rows_out[:-1]))

    def _row(self, ticket: Ticket, index: int, lane: LaneInput, tokens: list[int], row: int) -> int:
        assert lane.sampling is not None
        size = self.facts.block_positions
        seen = lane.past_len + lane.cur_len - lane.emit_rows + 1 + row
        cells = [self._cells[lane.blocks[p // size], p % size] for p in range(seen)]
        output = tuple(lane.output_history)
        if lane.sampling.needs_history:
            output = (*output, *(tokens if isinstance(lane.tokens, TokenFrom) else tokens[len(tokens) - lane.emit_rows + 1 :][:row]))
        draw = lane.draw and msgspec.structs.replace(lane.draw, index=lane.draw.index + row)
        token = sample(cells, lane.sampling, draw, (tuple(lane.prompt_history), output), self.facts.vocab)
        mask = self._masks.pop((ticket, index)) if lane.late_mask else lane.mask
        return masked(token, mask if mask is None or lane.emit_rows == 1 else mask[row], self.facts.vocab)

    def _completion(self, job: _Job, lanes: tuple[LaneOutput, ...], end: int, error: Exception | None) -> Completion:
        rows = sum(lane.cur_len for lane in job.launch.lanes)
        infer = self.base_ns + rows * self.row_ns - 2000
        return Completion(
            ticket=job.ticket, lanes=lanes, submitted_ns=job.submitted, started_ns=end - infer - 2000, finished_ns=end,
            h2d_ns=1000, infer_ns=infer, d2h_ns=1000, h2d_bytes=0, d2h_bytes=4 * len(lanes), error=error,
        )  # fmt: skip
