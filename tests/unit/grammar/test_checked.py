"""Constraints compile in processes of their own: in bounded time and memory, and beside each other."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from calstack.errors import NotInCalbin, RequestError
from calstack.grammar import CheckedGrammars, GrammarSpec
from tests.support.tiny_model import special, tokenizer_json, vocab_size

END = special("<|im_end|>")
NEVER_DONE: dict[str, Any] = {
    "many remainders": {"type": "integer", "multipleOf": 9_999_991},
    "patterns that multiply": {"allOf": [{"type": "string", "pattern": f".*a.{{{n}}}"} for n in range(20)]},
}


def spec(schema: Any) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(schema), "schema")


def grammars_with(**more: Any) -> CheckedGrammars:
    return CheckedGrammars(tokenizer_json(), vocab=vocab_size(), eos=[END], **more)


@pytest.fixture(scope="module")
def checked() -> Iterator[CheckedGrammars]:
    grammars = grammars_with(seconds=0.5)
    yield grammars
    grammars.close()


@pytest.mark.parametrize("name", NEVER_DONE)
def test_constraint_that_would_compile_for_ever_is_refused_and_the_next_one_is_taken(checked: CheckedGrammars, name: str) -> None:
    with pytest.raises(RequestError, match="too long") as caught:
        checked.source(spec(NEVER_DONE[name]))
    assert caught.value.param == "schema"
    assert checked.source(spec({"type": "integer"}))


def test_memory_of_a_constraint_is_bounded() -> None:
    grammars = grammars_with(seconds=20, memory_bytes=64 << 20)
    with pytest.raises(RequestError, match="memory"):
        grammars.source(spec(NEVER_DONE["patterns that multiply"]))
    grammars.close()


def test_others_are_checked_beside_one_that_takes_long() -> None:
    grammars = grammars_with(seconds=30)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        stuck = pool.submit(grammars.source, spec(NEVER_DONE["many remainders"]))
        for bound in range(5):
            assert grammars.source(spec({"type": "integer", "maximum": bound}))
        assert not stuck.done()
        grammars.close()
        with pytest.raises(RequestError):
            stuck.result(10)


def test_error_keeps_its_words_and_place(checked: CheckedGrammars) -> None:
    with pytest.raises(RequestError, match="uniqueItems") as caught:
        checked.source(spec({"type": "array", "uniqueItems": True}))
    assert (caught.value.param, caught.value.where) == ("schema", "$.schema")
    with pytest.raises(RequestError, match="refused") as caught:
        checked.check("nonsense", "tools")
    assert caught.value.param == "tools"


def test_process_that_was_killed_is_replaced(checked: CheckedGrammars) -> None:
    checked.source(spec({"type": "boolean"}))
    victim = checked._idle[-1]
    os.kill(victim.pid, signal.SIGKILL)
    end = time.monotonic() + 10
    while victim.poll() is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert checked.source(spec({"type": "boolean", "title": "again"}))


def test_tokenizer_without_an_end_takes_no_constraint() -> None:
    with pytest.raises(NotInCalbin, match="end of sequence"):
        CheckedGrammars(tokenizer_json(), vocab=vocab_size(), eos=[]).source(spec({}))


def test_no_process_is_left_after_close() -> None:
    grammars = grammars_with()
    grammars.source(spec({"type": "null"}))
    (process,) = grammars._idle
    grammars.close()
    assert process.returncode is not None
