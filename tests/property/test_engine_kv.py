"""The block pool as a state machine: every block is free, held or idle in the cache, never two of them."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from calstack.engine.kv import BlockPool
from calstack.engine.prefix import root_key

SIZE = 4
ROOT = root_key(0, "")


class PoolMachine(RuleBasedStateMachine):
    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12, SIZE, cache_limit=5)
        self.holders: list[list[int]] = []
        self.contents: dict[int, tuple[int, ...]] = {}  # block -> the whole prefix it ends, as written last

    @rule(target=held, ids=st.lists(st.integers(0, 1), min_size=1, max_size=20))
    def start(self, ids: list[int]) -> list[int]:
        """A request: cached prefix first, the rest fresh, everything computed and named."""
        shared, key = self.pool.match(ROOT, ids, (len(ids) - 1) // SIZE)
        for n, block in enumerate(shared):
            assert self.contents[block] == tuple(ids[: (n + 1) * SIZE]), "a prefix hit with other contents"
        more = self.pool.take(-(-len(ids) // SIZE) - len(shared))
        if more is None:
            self.pool.release(shared)
            return []
        blocks = [*shared, *more]
        for n in range(len(shared), len(blocks)):
            users = sum(blocks[n] in other for other in self.holders)
            assert users == 0, "a fresh block is held by another request"
            self.contents[blocks[n]] = tuple(ids[: (n + 1) * SIZE])
            if (n + 1) * SIZE <= len(ids):
                key = self.pool.publish(key, ids[n * SIZE : (n + 1) * SIZE], blocks[n])
        self.holders.append(blocks)
        return blocks

    @rule(blocks=consumes(held))
    def end(self, blocks: list[int]) -> None:
        if blocks:
            self.holders.remove(blocks)
            self.pool.release(blocks)

    @rule()
    def lose_contents(self) -> None:
        self.pool.forget()

    @invariant()
    def counts_agree(self) -> None:
        held = {block for blocks in self.holders for block in blocks}
        assert self.pool.held == len(held)
        assert self.pool.available == self.pool.total - len(held)
        if not self.holders:
            assert self.pool.leaks() == 0


TestPool = PoolMachine.TestCase
