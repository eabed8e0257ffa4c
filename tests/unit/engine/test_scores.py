"""Scores of prompts, and outputs with a least length: over real devices and a hand-made calbin."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from calstack.devices.base import Device, OpenOptions
from calstack.devices.registry import open_device
from calstack.engine.assemble import assemble
from calstack.engine.driver import Driver
from calstack.engine.options import EngineOptions
from calstack.engine.scores import scores
from calstack.specs import LogitBias, SamplingParams
from calstack.wire import Submit, TokenLogprob
from tests.support.tiny_calbin import Tiny, write_tiny

TINY = Tiny(context=256, prefill_rows=64, batch=4)
GREEDY = SamplingParams(temperature=0.0)
PROMPT = tuple((7 * i + 3) % TINY.vocab for i in range(70))


@pytest.fixture(scope="module")
def calbin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("engine") / "tiny.calbin", TINY)


@pytest.fixture(params=["null", pytest.param("cpu", marks=pytest.mark.native)])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    opened = open_device(request.param, OpenOptions(threads=2, strict=True))
    yield opened
    opened.close()


def loaded(device: Device, calbin: Path, **options: object) -> Driver:
    return assemble(device, calbin, options=EngineOptions(**options))  # type: ignore[arg-type]


class Run:
    """What the engine gave for some requests."""

    def __init__(self, driver: Driver, *submits: Submit) -> None:
        self.ids: dict[str, list[int]] = {s.request: [] for s in submits}
        self.logprobs: dict[str, list[TokenLogprob]] = {s.request: [] for s in submits}
        self.prompt: dict[str, dict[int, TokenLogprob]] = {s.request: {} for s in submits}
        self.ends: dict[str, str] = {}
        events: tuple[Submit, ...] = submits
        while len(self.ends) < len(submits):
            for out in driver.turn(events).tokens:
                self.ids[out.request] += out.ids
                self.logprobs[out.request] += out.logprobs
                for place, one in enumerate(out.prompt_logprobs):
                    known = self.prompt[out.request].setdefault(out.prompt_start + place, one)
                    assert known == one
                if out.finish is not None:
                    self.ends[out.request] = out.finish.reason
            events = ()
            driver.runtime.wait(0.01)


def submit(name: str, prompt: tuple[int, ...] = PROMPT, max_tokens: int = 1, **more: object) -> Submit:
    return Submit(request=name, prompt=prompt, max_tokens=max_tokens, sampling=more.pop("sampling", GREEDY), seed=1, **more)  # type: ignore[arg-type]


@pytest.mark.native
@pytest.mark.parametrize("device", ["cpu"], indirect=True)  # the null device's logits say nothing of its ids
@pytest.mark.parametrize("chunk", [5, 32])
def test_scores_of_known_ids_are_those_they_were_sampled_with(device: Device, calbin: Path, chunk: int) -> None:
    driver = loaded(device, calbin, score_chunk=chunk)
    said = Run(driver, submit("said", max_tokens=30, top_logprobs=4))
    prompt = PROMPT + tuple(said.ids["said"])
    mates = [submit(f"m{i}", prompt[:60], 20) for i in range(2)]
    found = Run(driver, submit("a", prompt, prompt_logprobs=4), *mates).prompt["a"]
    assert sorted(found) == list(range(1, len(prompt)))
    for place, sampled in enumerate(said.logprobs["said"]):
        scored = found[len(PROMPT) + place]
        assert scored.top_ids == sampled.top_ids
        np.testing.assert_allclose(scored.top_logprobs, sampled.top_logprobs, atol=1e-4)
        assert scored.logprob == pytest.approx(sampled.logprob, abs=1e-4)


def test_every_prompt_id_is_scored_though_a_prefix_is_cached(device: Device, calbin: Path) -> None:
    driver = loaded(device, calbin)
    Run(driver, submit("before"))
    assert len(Run(driver, submit("a", prompt_logprobs=0)).prompt["a"]) == len(PROMPT) - 1


def test_a_prompt_of_one_id_has_no_scores(device: Device, calbin: Path) -> None:
    assert Run(loaded(device, calbin), submit("a", (5,), prompt_logprobs=2)).prompt["a"] == {}


@pytest.mark.native
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_no_stop_id_comes_before_the_least_length(device: Device, calbin: Path) -> None:
    driver = loaded(device, calbin)
    bias = SamplingParams(temperature=0.0, logit_bias=(LogitBias(token=9, bias=1e4),))
    free = Run(driver, submit("a", max_tokens=20, sampling=bias, stop_ids=(9,)))
    assert (free.ids["a"], free.ends["a"]) == ([], "stop")
    run = Run(driver, submit("a", max_tokens=20, sampling=bias, stop_ids=(9,), min_tokens=7), submit("b", max_tokens=20))
    assert (len(run.ids["a"]), run.ends["a"]) == (7, "stop")
    assert 9 not in run.ids["a"]


def test_the_record_of_a_launch_keeps_no_logits(device: Device, calbin: Path) -> None:
    driver = loaded(device, calbin)
    Run(driver, submit("a", prompt_logprobs=0))
    done = [record.completion for record in driver.runtime.recorder.records() if record.completion is not None]
    assert done
    assert all(lane.logits is None for completion in done for lane in completion.lanes)


def test_equal_logits_rank_by_id() -> None:
    row = np.array([[0.0, 2.0, 2.0, 2.0, 1.0]], np.float32)
    assert scores(row, [0], 2)[0].top_ids == (1, 2)
    assert scores(row, [0], 9)[0].top_ids == (1, 2, 3, 4, 0)
