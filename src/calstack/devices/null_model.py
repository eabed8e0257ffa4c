"""What the null device keeps and how it answers: running hashes per KV position instead of keys and values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from calstack.calbin.check import check_manifest
from calstack.calbin.manifest import Manifest
from calstack.calbin.reader import MANIFEST, MANIFEST_LIMIT
from calstack.devices.base import (
    CalbinHandle,
    CallTime,
    Completion,
    KVMove,
    KVMoveKind,
    LaneInput,
    LaneOutput,
    Launch,
    LogitRows,
    RowOutput,
    Ticket,
    TokenFrom,
)
from calstack.devices.checks import Bounds
from calstack.errors import ArtifactError, DeviceError, DeviceRetryable

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Job", "Loaded", "mix", "read_manifest"]

_WORD = (1 << 64) - 1
_EMPTY = 0x51CA
_Sampled = dict[Ticket, tuple[CalbinHandle, list[int]]]
_Script = Callable[[LaneInput, int], int]


def mix(state: int, value: int) -> int:
    """One step of the running hash: the SplitMix64 finaliser of state and value."""
    z = (state * 0xD1342543DE82EF95 + value + 0x9E3779B97F4A7C15) & _WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
    return z ^ (z >> 31)


def read_manifest(calbin: Path) -> Manifest:
    """The manifest alone; no other file of the calbin has to exist.

    Raises:
        ArtifactError: when it cannot be read or does not hold together.
    """
    path = calbin / MANIFEST
    remedy = "give the directory that `calstack compile` wrote"
    try:
        if path.stat().st_size > MANIFEST_LIMIT:
            raise ArtifactError(f"has more than {MANIFEST_LIMIT} bytes", where=str(path), remedy=remedy)
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except OSError as error:
        raise ArtifactError(f"cannot be read: {error.strerror}", where=str(path), remedy=remedy) from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ArtifactError(f"is not valid: {error}", where=str(path), remedy="compile the model again") from error
    check_manifest(manifest, MANIFEST)
    return manifest


class Loaded:
    """A loaded calbin: its manifest and, per KV block, the hash after each position."""

    def __init__(self, manifest: Manifest, kv_blocks: int) -> None:
        self.manifest = manifest
        self.bounds = Bounds.of(manifest, kv_blocks)
        self._blocks: dict[int, list[int]] = {}

    def kv_bytes(self) -> int:
        """Bytes the blocks written so far would have."""
        return len(self._blocks) * self.manifest.kv.bytes_per_block

    def clear(self) -> None:
        """Forget all contents."""
        self._blocks.clear()

    def content(self, lane: LaneInput, position: int) -> int:
        """The hash after `position`, read through the lane's blocks; -1 gives the empty one."""
        if position < 0:
            return _EMPTY
        block = self._blocks.get(lane.blocks[position // self.bounds.block_positions])
        return block[position % self.bounds.block_positions] if block is not None else 0

    def append(self, lane: LaneInput, tokens: Sequence[int]) -> list[int]:
        """Write the lane's new positions; the hash after each of them."""
        state, size, states = self.content(lane, lane.past_len - 1), self.bounds.block_positions, []
        for position, token in enumerate(tokens, lane.past_len):
            state = mix(state, int(token))
            self._blocks.setdefault(lane.blocks[position // size], [0] * size)[position % size] = state
            states.append(state)
        return states

    def move(self, moves: Sequence[KVMove]) -> list[bytes]:
        """Apply moves in order; the bytes of each SAVE."""
        saved = []
        for m in moves:
            used = {KVMoveKind.COPY: (m.src, m.dst), KVMoveKind.SAVE: (m.src,)}.get(m.kind, (m.dst,))
            if any(not 0 <= block < self.bounds.kv_blocks for block in used):
                raise DeviceError(f"block {used} does not exist", where="null", remedy=f"there are {self.bounds.kv_blocks}")
            if m.kind is KVMoveKind.SAVE:
                saved.append(self._save(m.src))
            elif m.kind is KVMoveKind.CLEAR:
                self._blocks.pop(m.dst, None)
            else:
                self._blocks[m.dst] = self._states(m)
        return saved

    def _states(self, m: KVMove) -> list[int]:
        size = self.bounds.block_positions
        if m.kind is KVMoveKind.COPY:
            return list(self._blocks.get(m.src, [0] * size))
        want = self.manifest.kv.bytes_per_block
        if len(m.data) != want:
            raise DeviceError(f"a block has {want} bytes, not {len(m.data)}", where="null", remedy="restore what was saved")
        return [int(v) for v in np.frombuffer(m.data[: 8 * size], dtype=np.uint64)]

    def _save(self, block: int) -> bytes:
        states = self._blocks.get(block, [0] * self.bounds.block_positions)
        return np.array(states, dtype=np.uint64).tobytes().ljust(self.manifest.kv.bytes_per_block, b"\0")


@dataclasses.dataclass(slots=True)
class Job:
    """A queued launch and when it runs."""

    ticket: Ticket
    launch: Launch
    submitted_ns: int
    start_ns: int
    end_ns: int

    def run(self, loaded: Loaded, sampled: _Sampled, script: _Script | None) -> Completion:
        """Write the KV contents, choose ids, and give the completion."""
        ids = sampled[self.ticket][1]
        outputs = []
        for index, lane in enumerate(self.launch.lanes):
            tokens = self._tokens(lane, sampled)
            if tokens is None:
                del sampled[self.ticket]
                return self.failed(DeviceRetryable("the launch that its token comes from did not finish", where="null"), self.end_ns)
            outputs.append(_answer(loaded, lane, tokens, script))
            ids[index] = outputs[-1].token
        rows = sum(lane.cur_len for lane in self.launch.lanes)
        span = CallTime(name="null", layer=-1, start_ns=0, ns=self.end_ns - self.start_ns, bytes=0, ops=0)
        return dataclasses.replace(
            self._completion(self.end_ns),
            lanes=tuple(outputs),
            infer_ns=self.end_ns - self.start_ns,
            h2d_bytes=4 * rows,
            d2h_bytes=sum(4 * (o.token >= 0) + (0 if o.logits is None else o.logits.nbytes) for o in outputs),
            calls=(span,) if self.launch.profile else (),
        )

    def failed(self, error: Exception, now_ns: int) -> Completion:
        """The completion of a launch that did not run."""
        return dataclasses.replace(self._completion(now_ns), error=error)

    def _completion(self, now_ns: int) -> Completion:
        return Completion(
            ticket=self.ticket,
            lanes=(),
            submitted_ns=self.submitted_ns,
            started_ns=min(self.start_ns, now_ns),
            finished_ns=now_ns,
            h2d_ns=0,
            infer_ns=0,
            d2h_ns=0,
            h2d_bytes=0,
            d2h_bytes=0,
        )

    @staticmethod
    def _tokens(lane: LaneInput, sampled: _Sampled) -> Sequence[int] | None:
        if lane.cur_len == 0 or not isinstance(lane.tokens, TokenFrom):
            return () if lane.cur_len == 0 else lane.tokens  # type: ignore[return-value]  # narrowed by the condition
        source = sampled.get(lane.tokens.ticket)
        return None if source is None else (source[1][lane.tokens.lane],)


def _answer(loaded: Loaded, lane: LaneInput, tokens: Sequence[int], script: _Script | None) -> LaneOutput:
    if (encoder := loaded.manifest.model.encoder) is not None:
        return _encoded(lane, tokens, loaded.manifest.model.hidden if encoder.pooling != "none" else 0, len(encoder.labels))
    states = loaded.append(lane, tokens)
    count = lane.emit_rows if lane.emit and states else 0
    rows = [_row(lane, _one_row(lane, tokens, j), states[len(states) - count + j], loaded, script) for j in range(count)]
    last = rows[-1] if rows else RowOutput(-1, math.nan, (), ())
    logits = _logits(lane, states, loaded.bounds.vocab)
    return LaneOutput(last.token, last.logprob, last.top_ids, last.top_logprobs, logits, before=tuple(rows[:-1]))


def _one_row(lane: LaneInput, tokens: Sequence[int], j: int) -> LaneInput:
    """Sampled row `j` as a lane of its own: its mask, its output index, and the history that it sees."""
    drafted = tokens[len(tokens) - lane.emit_rows + 1 :][:j] if lane.emit_rows > 1 else ()
    draw = lane.draw and msgspec.structs.replace(lane.draw, index=lane.draw.index + j)
    mask = lane.mask if lane.mask is None else lane.mask.reshape(lane.emit_rows, -1)[j]
    own = tokens if isinstance(lane.tokens, TokenFrom) else ()
    return dataclasses.replace(lane, draw=draw, mask=mask, output_history=(*lane.output_history, *own, *drafted), emit_rows=1)


def _row(lane: LaneInput, row: LaneInput, state: int, loaded: Loaded, script: _Script | None) -> RowOutput:
    seed = _draw(row, state)
    token = script(row, seed) if script is not None else _allowed(seed, row.mask, loaded.bounds.vocab)
    top = max(lane.top_logprobs, 0) if token >= 0 else 0
    return RowOutput(
        token=token,
        logprob=-0.5 if token >= 0 and lane.top_logprobs >= 0 else math.nan,
        top_ids=tuple((token + i) % loaded.bounds.vocab for i in range(top)),
        top_logprobs=tuple(-0.5 - i for i in range(top)),
    )


def _encoded(lane: LaneInput, tokens: Sequence[int], hidden: int, labels: int) -> LaneOutput:
    """Numbers in -1..1 that depend on the text alone."""
    state = _EMPTY
    for value in (*tokens, *lane.types):
        state = mix(state, int(value))
    values = np.array([mix(state, i) % 2001 / 1000 - 1 for i in range(hidden + labels)], np.float32)
    embedding, scores = values[:hidden] if hidden else None, values[hidden:] if labels else None
    return LaneOutput(
        token=-1, logprob=math.nan, top_ids=(), top_logprobs=(), logits=None, embedding=embedding if lane.cur_len else None, scores=scores
    )


def _draw(lane: LaneInput, state: int) -> int:
    """The hash of all that a sampled id may depend on."""
    sampling = lane.sampling
    if sampling is None:
        return state
    if not sampling.greedy and lane.draw is not None:
        for value in (lane.draw.seed, lane.draw.choice, lane.draw.index):
            state = mix(state, value)
    if sampling.needs_history:
        for value in (*lane.prompt_history, -1, *lane.output_history):
            state = mix(state, value)
    return state


def _allowed(seed: int, mask: npt.NDArray[np.int32] | None, vocab: int) -> int:
    if mask is None:
        return seed % vocab
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab]
    ids = np.flatnonzero(bits)
    return int(ids[seed % len(ids)]) if len(ids) else -2


def _logits(lane: LaneInput, states: Sequence[int], vocab: int) -> npt.NDArray[np.float32] | None:
    """One-hot rows: the greedy id of each row stands out, as `_allowed` without a mask would choose it."""
    if lane.logits == LogitRows.NONE or not states:
        return None
    chosen = states if lane.logits == LogitRows.ALL else states[-1:]
    rows = np.zeros((len(chosen), vocab), dtype=np.float32)
    rows[np.arange(len(chosen)), [s % vocab for s in chosen]] = 1.0
    return rows
