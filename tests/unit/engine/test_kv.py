"""The block pool and the prefix chain, one rule each; the state machine is in tests/property."""

from __future__ import annotations

import pytest

from calstack.engine.kv import BlockPool
from calstack.engine.prefix import chain, root_key


def test_take_gives_nothing_when_there_are_too_few() -> None:
    pool = BlockPool(3, 4)
    assert pool.take(4) is None
    assert pool.available == 3


def test_release_more_often_than_taken_is_caught() -> None:
    pool = BlockPool(3, 4)
    blocks = pool.take(1)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(AssertionError, match="more often"):
        pool.release(blocks)


def test_leaks_counts_blocks_that_nobody_gave_back() -> None:
    pool = BlockPool(3, 4)
    assert pool.take(2) is not None
    assert pool.leaks() == 2


def test_the_oldest_idle_chain_is_evicted_from_its_end() -> None:
    pool = BlockPool(4, 2, cache_limit=4)
    root = root_key(0, "")
    first = pool.take(2)
    assert first is not None
    key = pool.publish(root, [1, 2], first[0])
    pool.publish(key, [3, 4], first[1])
    pool.release(first)
    assert pool.take(3) is not None
    found, _ = pool.match(root, [1, 2, 3, 4, 5], 2)
    assert found == [first[0]]


def test_chains_of_other_salts_adapters_or_parents_never_meet() -> None:
    roots = {root_key(0, ""), root_key(1, ""), root_key(0, "x"), root_key(0, "1")}
    assert len(roots) == 4
    assert len({chain(root, [1, 2]) for root in roots}) == 4
    assert chain(chain(root_key(0, ""), [1]), [2]) != chain(root_key(0, ""), [1, 2])


def test_forget_frees_idle_blocks_and_names_of_held_ones() -> None:
    pool = BlockPool(2, 2, cache_limit=2)
    root = root_key(0, "")
    blocks = pool.take(2)
    assert blocks is not None
    pool.publish(root, [1, 2], blocks[0])
    pool.release(blocks[1:])
    pool.forget()
    pool.release(blocks[:1])
    assert pool.match(root, [1, 2, 3], 1)[0] == []
    assert pool.leaks() == 0
