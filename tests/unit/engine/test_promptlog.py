"""Log-probabilities of prompts, and the fewest tokens of an answer."""

from __future__ import annotations

import math

import numpy as np
import pytest

from calstack.engine.options import EngineOptions
from calstack.engine.promptlog import PromptLog
from calstack.engine.sequence import Sequence
from calstack.errors import DeviceNeedsReset
from calstack.specs import LogitBias, SamplingParams
from calstack.wire import Submit, TokenLogprob
from tests.support.facts import small_facts
from tests.support.fake_device import logits_of
from tests.support.harness import Harness

PROMPT = tuple(n * 7 % 90 for n in range(100))


def expected(prompt: tuple[int, ...], top: int, vocab: int) -> list[TokenLogprob]:
    """By the definition, with the whole row sorted."""
    found = []
    for position in range(1, len(prompt)):
        row = logits_of(list(enumerate(prompt[:position])), vocab).astype(np.float64)
        logprobs = row - row.max() - math.log(math.fsum(np.exp(row - row.max())))
        tops = sorted(range(vocab), key=lambda i: (-row[i], i))[:top]
        found.append(TokenLogprob(logprob=logprobs[prompt[position]], top_ids=tuple(tops), top_logprobs=tuple(logprobs[tops])))
    return found


def check(found: tuple[TokenLogprob, ...], prompt: tuple[int, ...], top: int, vocab: int) -> None:
    wanted = expected(prompt, top, vocab)
    assert [one.top_ids for one in found] == [one.top_ids for one in wanted]
    np.testing.assert_allclose([one.logprob for one in found], [one.logprob for one in wanted], atol=1e-6)
    np.testing.assert_allclose([one.top_logprobs for one in found], [one.top_logprobs for one in wanted], atol=1e-6)


@pytest.mark.parametrize("top", [0, 1, 5])
@pytest.mark.parametrize("max_tokens", [0, 6])
@pytest.mark.parametrize("length", [2, 31, 32, 33, 100])
def test_prompt_gets_a_log_probability_per_id_after_the_first(length: int, max_tokens: int, top: int) -> None:
    h = Harness(small_facts(context=128))
    h.run(h.submit("a", prompt=PROMPT[:length], max_tokens=max_tokens, prompt_logprobs=top))
    check(h.prompt_logprobs["a"], PROMPT[:length], top, h.facts.vocab)
    assert h.ids["a"] == h.alone("a")
    assert h.ends["a"].reason == "length"


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_prompt_of_one_id_has_none(max_tokens: int) -> None:
    h = Harness(small_facts(context=128))
    h.run(h.submit("a", prompt=(5,), max_tokens=max_tokens, prompt_logprobs=1))
    assert h.prompt_logprobs == {}
    assert h.ids["a"] == h.alone("a")


@pytest.mark.parametrize("chunk", [1, 7, 16, 512])
def test_chunks_batch_mates_and_cached_prefixes_change_nothing(chunk: int) -> None:
    h = Harness(small_facts(context=128), options=EngineOptions(prefill_chunk=chunk))
    h.run(h.submit("before", prompt=PROMPT, max_tokens=2))
    h.run(
        *[h.submit(f"r{i}", prompt=PROMPT[i:], max_tokens=4) for i in range(4)],
        h.submit("a", prompt=PROMPT, max_tokens=4, prompt_logprobs=2),
        h.submit("b", prompt=PROMPT[:50], max_tokens=0, prompt_logprobs=0),
    )
    check(h.prompt_logprobs["a"], PROMPT, 2, h.facts.vocab)
    check(h.prompt_logprobs["b"], PROMPT[:50], 0, h.facts.vocab)
    usage = h.ends["a"].usage
    assert usage is not None
    assert usage.cached_tokens == 0
    assert {name: h.ids[name] for name in h.submits} == {name: h.alone(name) for name in h.submits}


def test_reset_in_the_middle_of_the_prompt_changes_nothing() -> None:
    h = Harness(small_facts(context=128))
    h.turn(h.submit("a", prompt=PROMPT, max_tokens=3, prompt_logprobs=3))
    h.tick()
    h.device.faults.append(DeviceNeedsReset("now", where="fake"))
    h.run()
    assert h.runtime.resets == 1
    check(h.prompt_logprobs["a"], PROMPT, 3, h.facts.vocab)
    assert h.ids["a"] == h.alone("a")


def test_recorded_launches_keep_no_logits() -> None:
    h = Harness(small_facts(context=128))
    h.run(h.submit("a", prompt=PROMPT, max_tokens=1, prompt_logprobs=0))
    records = [record.completion for record in h.runtime.recorder.records()]
    assert records
    assert all(lane.logits is None for done in records if done is not None for lane in done.lanes)


@pytest.mark.parametrize("more", [{"prompt_logprobs": 21}, {"max_tokens": 0}, {"min_tokens": 1, "grammar": "x"}])
def test_what_cannot_be_is_refused(more: dict[str, object]) -> None:
    h = Harness(small_facts(context=128))
    h.run(h.submit("a", **more))  # type: ignore[arg-type]
    error = h.ends["a"].error
    assert error is not None
    assert error.kind == "RequestError"


def test_first_row_is_not_given_twice_after_a_start_over() -> None:
    rows = np.eye(3, dtype=np.float32)
    log = PromptLog((0, 1, 2, 0), 1)
    log.take(0, rows[:2])
    assert log.complete() is None
    log.take(0, rows)
    found = log.complete()
    assert found is not None
    assert [one.top_ids for one in found] == [(0,), (1,), (2,)]
    assert log.complete() is None


def test_stop_ids_are_forbidden_until_the_fewest_tokens_are_there() -> None:
    submit = Submit(request="a", prompt=(1, 2), max_tokens=9, sampling=SamplingParams(), seed=1, min_tokens=2, stop_ids=(7,))
    seq = Sequence(submit, order=1, now_ns=0, limit=9, stops=frozenset([7, 5]))
    seq.start(0, [0, 1], 0, b"", 0, 0)
    sampled = [seq.take(0, 0, 2), seq.take(1, 0, 1), seq.take(2, 0, 1)]
    banned = (LogitBias(token=5, bias=-math.inf), LogitBias(token=7, bias=-math.inf))
    biases = [lane.sampling.logit_bias for lane in sampled if lane.sampling is not None]
    assert biases == [banned, banned, ()]
