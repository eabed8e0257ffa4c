"""On the demo model, a request's ids depend on the request alone (docs/concepts/architecture.md, invariant 1).

Each axis is varied against one baseline here; `full` samples their product.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from calstack.devices.base import OpenOptions
from calstack.devices.registry import open_device
from calstack.engine.assemble import assemble
from calstack.engine.driver import Driver
from calstack.engine.options import EngineOptions
from calstack.errors import UsageError
from calstack.specs import SamplingParams
from calstack.text.tokenizer import Tokenizer
from calstack.wire import Cancel, Submit
from tests.support.schedule import play

pytestmark = [pytest.mark.native, pytest.mark.model]

TOKENS = 128
TEXT = (
    "In the beginning the valley was quiet, and the people who lived there knew the name of every hill. They kept 1,024 sheep, "
    "wrote their letters by hand, and met on Sundays under the old oak to settle what had to be settled. Then came the railway. "
) * 3
SUBJECTS = {
    "greedy": SamplingParams(temperature=0.0),
    "seeded": SamplingParams(temperature=0.9, top_k=50, top_p=0.95),
    "penalised": SamplingParams(temperature=0.7, repetition_penalty=1.1, frequency_penalty=0.2),
}
FAST_ISAS = ("avx512_bf16", "avx512_vnni", "avx2")
ISAS = (*FAST_ISAS, "portable")
Ids = dict[str, list[int]]


@contextmanager
def engine(calbin: Path, isa: str = "", **options: object) -> Iterator[Driver]:
    device = open_device("cpu", OpenOptions(isa=isa))
    try:
        yield assemble(device, calbin, options=EngineOptions(itl_target_ms=0.0, launch_timeout_s=600.0, **options))  # type: ignore[arg-type]
    finally:
        device.close()


class Prompts:
    def __init__(self, calbin: Path) -> None:
        self.ids = Tokenizer.from_file(calbin / "tokenizer.json").encode(TEXT, special=True)

    def subject(self, name: str, *, length: int = 150) -> Submit:
        sampling = SUBJECTS[name]
        prompt = tuple(self.ids[: length + len(name)])
        return Submit(request=name, prompt=prompt, max_tokens=TOKENS, sampling=sampling, seed=2**63 + 5, choice=1, ignore_eos=True)

    def mate(self, i: int, tokens: int) -> Submit:
        """A batch mate; a third of them share the subjects' prefix."""
        start = 0 if i % 3 == 0 else (7 * i) % 50
        prompt = tuple(self.ids[start : start + 20 + (37 * i) % 120])
        sampling = SamplingParams(temperature=0.5 * (i % 3), repetition_penalty=1.0 + 0.1 * (i % 2))
        return Submit(request=f"mate{i}", prompt=prompt, max_tokens=tokens, sampling=sampling, seed=i, ignore_eos=True)

    def crowd(self, subjects: Sequence[str], mates: int, *, churn: bool) -> dict[int, list[Submit | Cancel]]:
        """Subjects among mates; with `churn`, lanes empty and fill again while the subjects run."""
        first: list[Submit | Cancel] = [self.mate(i, (10 + 9 * i) if churn else TOKENS + 40) for i in range(mates)]
        script: dict[int, list[Submit | Cancel]] = {0: first, 5 * mates: [self.subject(name) for name in subjects]}
        if churn:
            script[20 * mates] = [self.mate(100 + i, 60) for i in range(mates)]
            script[40 * mates] = [Cancel(request=f"mate{100 + i}") for i in range(0, mates, 4)]
        return script


@pytest.fixture(scope="module")
def prompts(smollm2_calbin: Path) -> Prompts:
    return Prompts(smollm2_calbin)


@pytest.fixture(scope="module")
def baseline(smollm2_calbin: Path, prompts: Prompts) -> Ids:
    """Each subject alone, one launch in flight, its prompt in one piece, no prefix cache."""
    ids: Ids = {}
    with engine(smollm2_calbin, depth=1, prefix_cache=False) as driver:
        for name in SUBJECTS:
            ids |= play(driver, {0: [prompts.subject(name)]})[0]
    assert all(len(found) == TOKENS for found in ids.values())
    assert ids["greedy"][:16] != ids["seeded"][:16]
    return ids


def subjects_of(ids: Ids) -> Ids:
    return {name: ids[name] for name in SUBJECTS}


def test_alone_with_two_launches_in_flight(smollm2_calbin: Path, prompts: Prompts, baseline: Ids) -> None:
    with engine(smollm2_calbin) as driver:
        ids = {name: play(driver, {0: [prompts.subject(name)]})[0][name] for name in SUBJECTS}
    assert ids == baseline


def test_among_fifteen_others_whose_lanes_empty_and_fill(smollm2_calbin: Path, prompts: Prompts, baseline: Ids) -> None:
    with engine(smollm2_calbin) as driver:
        ids, _ = play(driver, prompts.crowd(list(SUBJECTS), 13, churn=True))
        assert driver.core.counters["cached_tokens"] > 0
        assert driver.core.counters["leaks"] == 0
    assert subjects_of(ids) == baseline


@pytest.mark.parametrize("chunk", [16, 100, 512])
def test_with_any_prefill_chunk(smollm2_calbin: Path, prompts: Prompts, baseline: Ids, chunk: int) -> None:
    with engine(smollm2_calbin, prefill_chunk=chunk) as driver:
        ids, _ = play(driver, {0: [prompts.subject(name) for name in SUBJECTS]})
    assert ids == baseline


@pytest.mark.parametrize(("mates", "batch"), [(0, 1), (3, 4), (7, 8), (15, 16)])
def test_on_every_decode_batch(smollm2_calbin: Path, prompts: Prompts, baseline: Ids, mates: int, batch: int) -> None:
    with engine(smollm2_calbin) as driver:
        ids, _ = play(driver, prompts.crowd(["penalised"], mates, churn=False))
        used = {record.plan.submodel for record in driver.runtime.recorder.records()}
        assert any(f".b{batch}." in key for key in used)
    assert ids["penalised"] == baseline["penalised"]


@pytest.fixture(scope="module")
def short_baseline(smollm2_calbin: Path, prompts: Prompts) -> Ids:
    """As `baseline`, with prompts that the scalar code can prefill in a test."""
    with engine(smollm2_calbin, depth=1) as driver:
        return {name: play(driver, {0: [prompts.subject(name, length=10)]})[0][name] for name in ("greedy", "seeded")}


@pytest.mark.timeout(600)  # without vector instructions a token takes tens of milliseconds
@pytest.mark.parametrize("isa", ISAS)
def test_on_every_instruction_set(smollm2_calbin: Path, prompts: Prompts, short_baseline: Ids, isa: str) -> None:
    script: dict[int, list[Submit | Cancel]] = {0: [prompts.subject(name, length=10) for name in short_baseline]}
    assert on_isa(smollm2_calbin, isa, script) == short_baseline


def test_after_blocks_ran_out_and_requests_were_preempted(smollm2_calbin: Path, prompts: Prompts, baseline: Ids) -> None:
    with engine(smollm2_calbin) as driver:
        bytes_per_block = driver.core.facts.bytes_per_block
    device = open_device("cpu", OpenOptions())
    try:
        driver = assemble(device, smollm2_calbin, kv_memory=17 * bytes_per_block)
        ids, _ = play(driver, prompts.crowd(list(SUBJECTS), 3, churn=False))
        assert driver.core.counters["preemptions"] > 0
    finally:
        device.close()
    assert subjects_of(ids) == baseline


def on_isa(calbin: Path, isa: str, script: dict[int, list[Submit | Cancel]], **options: object) -> Ids:
    try:
        with engine(calbin, isa=isa, **options) as driver:
            return play(driver, script)[0]
    except UsageError:
        pytest.skip(f"this machine has no {isa}")


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_the_scalar_reference_gives_the_same(smollm2_calbin: Path, prompts: Prompts, short_baseline: Ids) -> None:
    script: dict[int, list[Submit | Cancel]] = {0: [prompts.subject("greedy", length=10)]}
    assert on_isa(smollm2_calbin, "reference", script)["greedy"] == short_baseline["greedy"]


PRODUCT = list(itertools.product(FAST_ISAS, (16, 100, 512), (0, 3, 7, 13), (1, 2, 3), (True, False)))


@pytest.mark.full
@pytest.mark.parametrize(("isa", "chunk", "mates", "depth", "churn"), random.Random(2).sample(PRODUCT, 24))
def test_sampled_product(
    smollm2_calbin: Path, prompts: Prompts, baseline: Ids, isa: str, chunk: int, mates: int, depth: int, churn: bool
) -> None:
    script = prompts.crowd(list(SUBJECTS), mates, churn=churn and mates > 0)
    assert subjects_of(on_isa(smollm2_calbin, isa, script, prefill_chunk=chunk, depth=depth)) == baseline
