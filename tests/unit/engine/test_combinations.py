"""Every pair of engine features together: the same ids as the plain run of the same request; the table in docs comes from here.

Written by `python -m tests.unit.engine.test_combinations`.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest

from calstack.devices.base import OpenOptions
from calstack.devices.registry import open_device
from calstack.engine.assemble import assemble
from calstack.engine.options import EngineOptions
from calstack.engine.sequence import Sequence
from calstack.specs import KVDType, SamplingParams
from calstack.wire import Submit
from tests.support.constraints import ladders
from tests.support.schedule import play
from tests.support.tiny_calbin import Tiny, write_tiny

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "combinations.md"
TOKENS, MATES = 80, 4
FEATURES = {
    "batch": "4 other requests run at the same time",
    "prefix cache": "the prompt's beginning comes from another request's blocks",
    "speculation": "guessed ids, most of them right, are checked in `extend` launches",
    "chunks": "prompts are fed 16 tokens a launch, two launches in flight",
    "grammar": "a constraint masks every id",
    "logprobs": "log-probabilities of 3 ids come back",
    "int8 V": "the cache holds V in int8 (compared with itself alone)",
    "sampling": "temperature, top-p and penalties, seeded",
    "n": "the second of two choices",
    "shift": "the context is full in the middle of the answer, and half of it is dropped (compared with itself alone)",
}
HEAD = f"""# Features together

Each cell is a request of {TOKENS} tokens with both features, compared with the same request alone on a cold engine with one launch
in flight and nothing else on. `same`: identical ids. The other overflow policies act before a request reaches the engine: `reject`
refuses it, `truncate` makes it a shorter one.
The table is written and checked by `tests/unit/engine/test_combinations.py`.

"""

pytestmark = pytest.mark.native


def subject(on: frozenset[str]) -> Submit:
    prompt = tuple((5 * j) % 7 + 3 for j in range(470 if "shift" in on else 150))
    sampled = SamplingParams(temperature=0.8, top_p=0.95, repetition_penalty=1.1, frequency_penalty=0.1)
    return Submit(
        request="subject",
        prompt=prompt,
        max_tokens=TOKENS,
        sampling=sampled if "sampling" in on else SamplingParams(temperature=0.0),
        seed=77,
        choice=1 if "n" in on else 0,
        grammar="90,0" if "grammar" in on else "",
        top_logprobs=3 if "logprobs" in on else -1,
        ignore_eos=True,
        overflow="shift" if "shift" in on else "reject",
        keep=20,
    )


def others(on: frozenset[str]) -> list[Submit]:
    """Mates, or a request that leaves the subject's beginning in the cache, or its first choice."""
    one = subject(on)
    found = []
    if "batch" in on or "n" in on:
        found += [
            Submit(request=f"m{i}", prompt=one.prompt[i : 40 + 9 * i], max_tokens=100, sampling=one.sampling, seed=i, ignore_eos=True)
            for i in range(MATES)
        ]
    if "prefix cache" in on:
        prompt = (*one.prompt[:140], 9, 9)
        found.append(Submit(request="before", prompt=prompt, max_tokens=90, sampling=one.sampling, seed=5, ignore_eos=True))
    return found


def run(calbin: Path, on: frozenset[str], *, plain: bool) -> tuple[list[int], dict[str, int]]:
    options = EngineOptions(
        depth=2 if "chunks" in on and not plain else 1,
        prefix_cache="prefix cache" in on and not plain,
        speculation="speculation" in on and not plain,
        adapt_guesses=False,
        prefill_chunk=16 if "chunks" in on and not plain else 512,
        itl_target_ms=0.0,
    )
    device = open_device("cpu", OpenOptions(threads=2))
    driver = assemble(device, calbin, options=options, grammars=lambda facts: ladders(facts.vocab))
    script = {0: [subject(on)]} if plain else {0: others(on), 60 if others(on) else 1: [subject(on)]}
    ids, _ = play(driver, script)
    device.close()
    return ids["subject"], dict(driver.core.counters)


def _oracle(answer: list[int]) -> Callable[[Sequence, int], list[int]]:
    """Guesses are the answer itself, every fifth id of it changed; of others there are none."""

    def propose(seq: Sequence, most: int) -> list[int]:
        if seq.request != "subject":
            return []
        at = len(seq.output)
        return [(t + 1) % 160 if (at + i) % 5 == 4 else t for i, t in enumerate(answer[at : at + most])]

    return propose


def calbins(folder: Path) -> dict[bool, Path]:
    """With int8 V and without."""
    kinds = {True: KVDType.BF16_V8, False: KVDType.BF16}
    return {v8: write_tiny(folder / f"{v8}.calbin", Tiny(context=512, batch=8, kv=kv)) for v8, kv in kinds.items()}


def cell(paths: dict[bool, Path], on: frozenset[str]) -> str:
    """What becomes of a request with these features."""
    calbin = paths["int8 V" in on]
    alone, _ = run(calbin, on, plain=True)
    with patch.object(Sequence, "_propose", _oracle(alone)):
        together, counters = run(calbin, on, plain=False)
    assert together == alone, sorted(on)
    assert len(together) == TOKENS
    assert counters.get("leaks", 0) == 0
    assert counters.get("shifts", 0) == (1 if "shift" in on else 0)
    if "prefix cache" in on:
        assert counters["cached_tokens"] >= 128
    assert ("speculation" in on) == (counters.get("spec_drafts", 0) > 0)
    return "same"


def page(paths: dict[bool, Path]) -> str:
    names = list(FEATURES)
    lines = [f"- **{name}**: {what}" for name, what in FEATURES.items()]
    lines += ["", "| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    cells = {frozenset(pair): cell(paths, frozenset(pair)) for pair in itertools.combinations_with_replacement(names, 2)}
    lines += [f"| **{a}** | " + " | ".join(cells[frozenset((a, b))] for b in names) + " |" for a in names]
    return HEAD + "\n".join(lines) + "\n"


def test_every_pair_gives_the_ids_of_the_plain_run_and_the_table_says_so(tmp_path: Path) -> None:
    assert PAGE.read_text() == page(calbins(tmp_path))


@pytest.mark.parametrize("v8", [False, True])
def test_everything_together_gives_the_ids_of_the_plain_run(tmp_path: Path, v8: bool) -> None:
    on = frozenset(FEATURES) - {"grammar"} - (frozenset() if v8 else {"int8 V"})
    assert cell(calbins(tmp_path), on) == "same"
    assert cell(calbins(tmp_path / "again"), on | {"grammar"}) == "same"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        PAGE.write_text(page(calbins(Path(folder))))
