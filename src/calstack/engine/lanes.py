"""Who holds which lane and which KV blocks: admission from the queue, growth, preemption, and giving everything back."""

from __future__ import annotations

from collections import Counter

from calstack.engine.admission import Queue
from calstack.engine.kv import BlockPool
from calstack.engine.sequence import Phase, Sequence

__all__ = ["Lanes"]


class Lanes:
    """The queue, the lanes and the block pool. Every way out of a lane goes through `vacate`."""

    def __init__(self, lanes: int, pool: BlockPool, counters: Counter[str]) -> None:
        self.pool, self.queue, self.counters = pool, Queue(), counters
        self._slots: list[Sequence | None] = [None] * lanes
        self._blocked: Sequence | None = None  # the head of the queue, when it waits for blocks
        self.blocked_ns = 0  # since when
        self.abandoned: list[tuple[int, int]] = []  # (plan id, lane) that wait for a mask which will not come

    @property
    def running(self) -> list[Sequence]:
        """Requests that hold a lane, by lane."""
        return [seq for seq in self._slots if seq is not None]

    @property
    def blocked(self) -> Sequence | None:
        """The head of the queue when it could run but for blocks, which it has been waiting for since `blocked_ns`."""
        return self._blocked if self._blocked is not None and self._blocked is self.queue.head else None

    def leaks(self) -> int:
        """Lanes and blocks still held; call it when nothing runs."""
        return self.pool.leaks() + len(self.running)

    def admit(self, now_ns: int) -> None:
        """Give lanes and blocks to the queue's head while it can have them; nobody overtakes it."""
        while (head := self.queue.head) is not None and None in self._slots and self._may_join(head):
            if not self._start(head, now_ns):
                if self._blocked is not head:
                    self._blocked, self.blocked_ns = head, now_ns
                return
        self._blocked = None

    def room(self, seq: Sequence) -> bool:
        """Make sure that the next position has a block; a request without tokens in flight may preempt the youngest."""
        if seq.planned < len(seq.blocks) * self.pool.positions:
            return True
        while (block := self.pool.take(1)) is None:
            if seq.pending:
                return False
            victim = max(self.running, key=lambda s: s.rank)
            self.counters["preemptions"] += 1
            self.requeue(victim)
            if victim is seq:
                return False
        seq.blocks.extend(block)
        return True

    def spare(self, seq: Sequence, most: int) -> int:
        """Positions behind the next one that a request may take: those of its blocks, and of a free block that nobody waits for."""
        size = self.pool.positions
        most = min(most, seq.to_come - 1)  # a lane has no blocks beyond the context
        if seq.planned + 1 + most > len(seq.blocks) * size and self.queue.head is None and (block := self.pool.take(1)) is not None:
            seq.blocks.extend(block)
        return max(0, min(most, len(seq.blocks) * size - seq.planned - 1))

    def publish(self, seq: Sequence) -> None:
        """Name blocks that are full of computed, known ids."""
        size = self.pool.positions
        while self.pool.cache_limit and seq.cacheable and (seq.hashed + 1) * size <= seq.done:
            start = seq.hashed * size
            seq.key = self.pool.publish(seq.key, seq.ids(start, start + size), seq.blocks[seq.hashed])
            seq.hashed += 1

    def requeue(self, seq: Sequence) -> None:
        """Take lane and blocks from a running request; it starts over from its known ids when its turn comes."""
        self.vacate(seq, Phase.WAITING)
        self.queue.push(seq)

    def vacate(self, seq: Sequence, phase: Phase) -> None:
        """A request, running or not, leaves whatever it holds and becomes `phase`."""
        if seq.slot >= 0:
            self._slots[seq.slot] = None
        self.abandoned.extend(seq.unmasked)
        self.pool.release(seq.stop(phase))

    def _may_join(self, head: Sequence) -> bool:
        running = self.running
        return not running or not (head.solo or any(seq.solo for seq in running))

    def _start(self, seq: Sequence, now_ns: int) -> bool:
        shared, key = self._match(seq)
        size = self.pool.positions
        more = self.pool.take(seq.length // size + 1 - len(shared))  # the known ids and the next one
        if more is None:
            self.pool.release(shared)
            return False
        self.queue.remove(seq)
        if not seq.started_ns:
            self.queue.charge(seq)
        slot = self._slots.index(None)
        self._slots[slot] = seq
        seq.start(slot, [*shared, *more], len(shared), key, len(shared) * size, now_ns)
        self.counters["cached_tokens"] += len(shared) * size
        return True

    def _match(self, seq: Sequence) -> tuple[list[int], bytes]:
        if not seq.cacheable or seq.scored or not self.pool.cache_limit:
            return [], seq.key
        limit = (seq.length - 1) // self.pool.positions  # the last id must be computed: it gives the next token
        return self.pool.match(seq.key, seq.ids(0, seq.length), limit)
