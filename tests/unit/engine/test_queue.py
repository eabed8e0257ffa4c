"""Who is served next: priorities, fair shares between keys, and those that have run before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from calstack.engine.admission import Queue
from calstack.engine.sequence import Sequence
from calstack.specs import SamplingParams
from calstack.wire import Submit


def waiting(order: int, key: str = "", *, priority: int = 0, prompt: int = 10, limit: int = 10) -> Sequence:
    submit = Submit(
        request=str(order), prompt=(1,) * prompt, max_tokens=limit, sampling=SamplingParams(), seed=0, key=key, priority=priority
    )
    return Sequence(submit, order=order, now_ns=0, limit=limit, stops=frozenset())


def served(queue: Queue, count: int) -> list[Sequence]:
    """Start `count` requests, one after the other."""
    out: list[Sequence] = []
    for _ in range(count):
        head = queue.head
        assert head is not None
        queue.remove(head)
        queue.charge(head)
        out.append(head)
    return out


def filled(*items: Sequence) -> Queue:
    queue = Queue()
    for item in items:
        queue.push(item)
    return queue


def test_without_keys_it_is_first_come_first_served_within_a_priority() -> None:
    queue = filled(waiting(1, priority=1), waiting(2), waiting(3), waiting(4, priority=-1))
    assert [s.order for s in served(queue, 4)] == [4, 2, 3, 1]
    assert (len(queue), queue.tokens, queue.head) == (0, 0, None)


def test_a_key_with_many_requests_does_not_hold_another_up() -> None:
    queue = filled(*(waiting(i, "crowd") for i in range(1, 21)), waiting(21, "one"))
    assert 21 in [s.order for s in served(queue, 2)]


def test_keys_get_equal_tokens_not_equal_turns() -> None:
    queue = filled(*(waiting(i, "long", limit=90) for i in range(40)), *(waiting(100 + i, "short", limit=15) for i in range(200)))
    tokens = {"long": 0, "short": 0}
    for seq in served(queue, 100):
        tokens[seq.submit.key] += len(seq.submit.prompt) + seq.limit
    assert abs(tokens["long"] - tokens["short"]) <= 100


def test_a_key_that_was_away_saves_up_no_claim() -> None:
    queue = filled(*(waiting(i, "busy") for i in range(50)))
    served(queue, 30)
    for i in range(20):
        queue.push(waiting(100 + i, "away"))
    keys = [s.submit.key for s in served(queue, 10)]
    assert 4 <= keys.count("busy") <= 6


def test_a_request_that_has_run_before_goes_ahead() -> None:
    again = waiting(9, "crowd")
    queue = filled(waiting(2, "other"))
    for i in range(3, 6):
        queue.charge(waiting(i, "crowd"))
    queue.push(again)
    assert queue.head is not again
    again.started_ns = 1
    assert queue.head is again


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.integers(1, 50)), min_size=1, max_size=60))
def test_everybody_is_served_once_and_priorities_hold(items: list[tuple[str, int, int]]) -> None:
    queue = filled(*(waiting(i, key, priority=priority, limit=limit) for i, (key, priority, limit) in enumerate(items)))
    out = served(queue, len(items))
    assert sorted(s.order for s in out) == list(range(len(items)))
    priorities = [s.submit.priority for s in out]
    assert priorities == sorted(priorities)
    for key in "abc":
        for priority in range(3):
            orders = [s.order for s in out if (s.submit.key, s.submit.priority) == (key, priority)]
            assert orders == sorted(orders)
