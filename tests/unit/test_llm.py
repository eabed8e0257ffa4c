"""A calbin in this process: events, text, cancel by leaving, errors, scores and the summary."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from calstack.errors import CalstackError, ContextSizeError, OverloadedError, RequestError
from calstack.llm import LLM, load
from calstack.specs import SamplingParams
from tests.support.tiny_calbin import Tiny, forward, write_tiny
from tests.support.tiny_model import TEMPLATE, tokenizer_json, vocab_size

TINY = Tiny(vocab=-(-vocab_size() // 16) * 16, context=256, prefill_rows=64)


@pytest.fixture(scope="module")
def calbin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tiny(tmp_path_factory.mktemp("llm") / "tiny.calbin", TINY)
    (path / "tokenizer.json").write_text(tokenizer_json())
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture
def llm(calbin: Path) -> Iterator[LLM]:
    with load(calbin, device="null") as llm:
        yield llm


def test_generate_gives_ids_and_their_text_and_one_end(llm: LLM) -> None:
    events = list(llm.generate("hello world", max_tokens=12, ignore_eos=True))
    ids = [id_ for event in events for id_ in event.ids]
    assert len(ids) == 12
    assert [event.finish is not None for event in events] == [False] * (len(events) - 1) + [True]
    assert (ids, "".join(event.text for event in events)) == llm.complete("hello world", max_tokens=12, ignore_eos=True)


def test_generations_interleave_without_changing_each_other(llm: LLM) -> None:
    alone = [llm.complete([i, 5, 6], max_tokens=20, ignore_eos=True)[0] for i in range(3)]
    streams = [llm.generate([i, 5, 6], max_tokens=20, ignore_eos=True) for i in range(3)]
    assert [[id_ for event in stream for id_ in event.ids] for stream in streams] == alone


def test_leaving_a_generation_cancels_it(llm: LLM) -> None:
    stream = llm.generate("hello", max_tokens=200, ignore_eos=True)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    llm.complete("hello", max_tokens=1)
    assert llm.driver.core.counters["ended_cancelled"] == 1
    assert llm.driver.core.pool.leaks() == 0


def test_a_seed_repeats_a_draw_and_another_changes_it(llm: LLM) -> None:
    sampling = SamplingParams(temperature=1.0)
    first, again, other = (llm.complete("hello", sampling=sampling, seed=s, max_tokens=20, ignore_eos=True)[0] for s in (1, 1, 2))
    assert first == again != other


def test_what_the_engine_refuses_is_raised(llm: LLM) -> None:
    with pytest.raises(RequestError):
        llm.complete([10**6])
    with pytest.raises(RequestError):
        llm.complete([1] * 256)
    with pytest.raises(CalstackError):
        llm.complete([], max_tokens=1)


def test_chat_ids_follow_the_template(llm: LLM) -> None:
    pieces = llm.model.tokenizer.pieces
    text = b"".join(pieces.bytes_of(id_) for id_ in llm.chat_ids([{"role": "user", "content": "hello"}])).decode()
    assert text == "<|im_start|>user<|say|>hello<|im_end|>\n<|im_start|>assistant<|say|>"


def test_score_is_refused_while_generations_run_or_past_the_context(llm: LLM) -> None:
    stream = llm.generate("hello", max_tokens=200, ignore_eos=True)
    next(stream)
    with pytest.raises(OverloadedError):
        next(llm.score([1, 2, 3]))
    stream.close()  # type: ignore[attr-defined]
    llm.complete("x", max_tokens=1)
    with pytest.raises(ContextSizeError):
        next(llm.score([1] * 300))


def test_summary_counts_rows_and_labels_time(llm: LLM) -> None:
    llm.complete([1, 2, 3], max_tokens=11, ignore_eos=True)
    summary = llm.summary()
    assert (summary.prefill.tokens, summary.decode.tokens) == (3, 10)
    assert "tok/s" in summary.line()


@pytest.mark.native
@pytest.mark.parametrize("chunk", [0, 7])
def test_score_gives_the_model_s_logits_row_by_row(calbin: Path, chunk: int) -> None:
    ids = [(11 * i) % TINY.vocab for i in range(100)]
    with load(calbin) as llm:
        parts = list(llm.score(ids, chunk=chunk))
        assert llm.driver.core.pool.leaks() == 0
    wanted = forward(TINY, ids)
    assert max(len(part) for part in parts) <= (chunk or 64)
    np.testing.assert_allclose(np.concatenate(parts), wanted, atol=1e-4 * float(np.abs(wanted).max()))
