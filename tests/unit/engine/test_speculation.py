"""Guesses change no id: with and without speculation every request gives the same, whatever is guessed right or wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calstack.devices.base import OpenOptions
from calstack.devices.registry import open_device
from calstack.engine.assemble import assemble
from calstack.engine.costs import StepCosts, best_guesses
from calstack.engine.drafts import Acceptance, Lookup
from calstack.engine.driver import Driver
from calstack.engine.options import EngineOptions
from calstack.engine.sequence import Sequence
from calstack.specs import SamplingParams
from calstack.wire import Cancel, Submit
from tests.support.constraints import ladders
from tests.support.schedule import play
from tests.support.tiny_calbin import Tiny, write_tiny

TINY = Tiny(context=512, prefill_rows=64, batch=8)
GREEDY = SamplingParams(temperature=0.0)
SAMPLINGS = (
    GREEDY,
    SamplingParams(temperature=0.8, top_k=4),
    SamplingParams(temperature=0.3, repetition_penalty=1.3, frequency_penalty=0.2),
)


@pytest.fixture(scope="module")
def calbin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("speculation") / "tiny.calbin", TINY)


def request(i: int, *, grammar: str = "") -> Submit:
    prompt = tuple((7 * j + i) % 5 + 3 for j in range(40 + i))  # it repeats, so there is always something to guess
    return Submit(
        request=f"r{i}",
        prompt=prompt,
        max_tokens=70,
        sampling=SAMPLINGS[i % 3],
        seed=i,
        top_logprobs=i % 2,
        ignore_eos=True,
        grammar=grammar,
    )


def run(name: str, calbin: Path, script: dict[int, list[Submit | Cancel]], **options: object) -> tuple[dict[str, list[int]], Driver]:
    device = open_device(name, OpenOptions(threads=2, strict=True))
    driver = assemble(device, calbin, options=EngineOptions(**options), grammars=lambda facts: ladders(facts.vocab))  # type: ignore[arg-type]
    ids, _ = play(driver, script)
    device.close()
    return ids, driver


@pytest.fixture(params=["null", pytest.param("cpu", marks=pytest.mark.native)])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def oracle(monkeypatch: pytest.MonkeyPatch, answers: dict[str, list[int]], wrong_every: int) -> None:
    """Guesses are the answers themselves, every `wrong_every`th id of them changed."""

    def propose(seq: Sequence, most: int) -> list[int]:
        at = len(seq.output)
        guesses = answers[seq.request][at : at + most]
        return [(t + 1) % TINY.vocab if (at + i) % wrong_every == wrong_every - 1 else t for i, t in enumerate(guesses)]

    monkeypatch.setattr(Sequence, "_propose", propose)


@pytest.mark.parametrize("wrong_every", [2, 5, 1000])
@pytest.mark.parametrize("count", [1, 3, 6])
def test_ids_are_those_without_speculation(name: str, calbin: Path, count: int, wrong_every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    script: dict[int, list[Submit | Cancel]] = {0: [request(i) for i in range(count)]}
    plain, _ = run(name, calbin, script)
    oracle(monkeypatch, plain, wrong_every)
    guessed, driver = run(name, calbin, script, speculation=True)
    assert guessed == plain
    counters = driver.core.counters
    assert counters["spec_draft_tokens"] >= counters["spec_accepted_tokens"] > 0
    assert wrong_every == 1000 or counters["spec_draft_tokens"] > counters["spec_accepted_tokens"]
    assert counters["leaks"] == 0


def test_ids_stay_with_cancellations_preemptions_and_grammars(name: str, calbin: Path) -> None:
    script: dict[int, list[Submit | Cancel]] = {
        0: [request(i) for i in range(5)],
        30: [Cancel(request="r1"), request(7, grammar="25,0")],
        90: [request(8), Cancel(request="r3")],
    }
    plain, _ = run(name, calbin, script)
    guessed, driver = run(name, calbin, script, speculation=True, prefix_cache=False, depth=2)
    for i in (0, 2, 4, 7, 8):
        assert guessed[f"r{i}"] == plain[f"r{i}"], i
    assert driver.core.counters["leaks"] == 0


def test_right_guesses_save_launches(calbin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script: dict[int, list[Submit | Cancel]] = {0: [request(0)]}
    plain, before = run("null", calbin, script)
    oracle(monkeypatch, plain, 1000)
    guessed, after = run("null", calbin, script, speculation=True)
    assert plain == guessed
    launches = [driver.runtime.recorder.records()[-1].plan.id for driver in (before, after)]
    assert launches[1] < 0.5 * launches[0]


def test_lookup_proposes_what_followed_the_last_time() -> None:
    lookup = Lookup()
    lookup.extend([1, 2, 3, 4, 5, 1, 2, 3], [])
    assert lookup.propose(4) == [4, 5, 1, 2]
    lookup.extend([1, 2, 3, 4, 5, 1, 2, 3], [4])
    assert lookup.propose(2) == [5, 1]
    lookup.extend([1, 2, 3, 4, 5, 1, 2, 3], [4, 9])
    assert lookup.propose(2) == []


@settings(max_examples=60, deadline=None)
@given(prompt=st.lists(st.integers(0, 3), max_size=30), output=st.lists(st.integers(0, 3), max_size=30), most=st.integers(1, 8))
def test_lookup_grown_step_by_step_is_lookup_grown_at_once(prompt: list[int], output: list[int], most: int) -> None:
    slow, fast = Lookup(), Lookup()
    for n in range(len(output) + 1):
        slow.extend(prompt, output[:n])
    fast.extend(prompt, output)
    ids = prompt + output
    assert slow.propose(most) == fast.propose(most)
    ends = [e for e in range(3, len(ids)) if ids[e - 3 : e] == ids[-3:]] if len(ids) >= 3 else []
    assert fast.propose(most) == (ids[ends[-1] : ends[-1] + most] if ends else [])


def test_guesses_are_taken_along_only_where_they_give_more_ids_a_second() -> None:
    costs = StepCosts()
    costs.decode("plain", 1_000_000)
    for rows, ns in ((1, 1_000_000), (2, 1_300_000), (4, 1_500_000), (5, 9_000_000)):
        costs.extend(rows, ns)
    sure, poor = Acceptance(), Acceptance()
    sure.share, poor.share = 0.95, 0.05
    assert best_guesses([sure.expected], [7], costs, "plain") == [3]
    assert best_guesses([poor.expected], [7], costs, "plain") == [0]
    assert best_guesses([sure.expected, poor.expected], [7, 7], costs, "plain") == [2, 0]
