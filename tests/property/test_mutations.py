"""Bugs kept on purpose: each is put into the engine for one run of the state machine, which must notice it.

A machine that passes with one of these in place has lost its eyes; fix the machine, not this test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from calstack.engine.admission import Queue
from calstack.engine.kv import BlockPool
from calstack.engine.sequence import Sequence as Request
from tests.property.test_engine_core import EngineMachine
from tests.property.test_engine_kv import PoolMachine

QUICK = settings(
    max_examples=400,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.generate,),  # found is enough: nothing is shrunk
    database=None,
)
Mutate = Callable[[pytest.MonkeyPatch], None]


def shared_block(patch: pytest.MonkeyPatch) -> None:
    """A block given out once more while somebody holds it."""
    take = BlockPool.take

    def mutated(self: BlockPool, count: int) -> list[int] | None:
        taken = take(self, count)
        held = [block for block, refs in enumerate(self._refs) if refs > 0 and taken is not None and block not in taken]
        if taken and held and len(held) % 3 == 0:
            self.release(taken[-1:])
            self._refs[held[0]] += 1
            taken[-1] = held[0]
        return taken

    patch.setattr(BlockPool, "take", mutated)


def count_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """The last block of a long chain keeps its reference."""
    release = BlockPool.release

    def mutated(self: BlockPool, blocks: Sequence[int]) -> None:
        release(self, blocks[:-1] if len(blocks) > 2 else blocks)

    patch.setattr(BlockPool, "release", mutated)


def starved_queue(patch: pytest.MonkeyPatch) -> None:
    """A request that comes while another waits is never looked at again."""
    push = Queue.push

    def mutated(self: Queue, seq: Request) -> None:
        push(self, seq)
        if len(self) > 1:
            self.remove(seq)

    patch.setattr(Queue, "push", mutated)


@pytest.mark.parametrize("mutate", [shared_block, count_off_by_one, starved_queue], ids=lambda m: m.__name__)
def test_the_engine_machine_notices(mutate: Mutate, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017  # however it shows
        run_state_machine_as_test(EngineMachine, settings=QUICK)


@pytest.mark.parametrize("mutate", [shared_block, count_off_by_one], ids=lambda m: m.__name__)
def test_the_pool_machine_notices(mutate: Mutate, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017  # however it shows
        run_state_machine_as_test(PoolMachine, settings=QUICK)


def test_the_machines_pass_without_them() -> None:
    run_state_machine_as_test(EngineMachine, settings=settings(QUICK, max_examples=20))
    run_state_machine_as_test(PoolMachine, settings=settings(QUICK, max_examples=20))
