"""Filling in between two texts, on a model with tokens for it. The fake engine answers with the prompt's ids, in their order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.live_server import LiveServer, live_server

FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>")


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("coder"), more_specials=FIM) as running:
        yield running


def submitted(server: LiveServer, path: str, **body: object) -> str:
    """The prompt that the engine got, with special tokens in their written form."""
    prompts: list[tuple[int, ...]] = []
    accept = server.context.journal.accept

    def watched(submit, sink):
        prompts.append(submit.prompt)
        return accept(submit, sink)

    server.context.journal.accept = watched  # type: ignore[method-assign]
    try:
        response = server.post(path, max_tokens=50, **body)
    finally:
        server.context.journal.accept = accept  # type: ignore[method-assign]
    assert response.status_code == 200, response.text
    return str(server.post("/detokenize", tokens=prompts[0]).json()["content"])


def test_suffix_makes_the_prompt_that_infill_makes(coder: LiveServer) -> None:
    wanted = "<|fim_prefix|>def f(<|fim_suffix|>): pass<|fim_middle|>"
    assert submitted(coder, "/v1/completions", prompt="def f(", suffix="): pass") == wanted
    assert submitted(coder, "/infill", input_prefix="def f(", input_suffix="): pass") == wanted


def test_other_files_come_first_and_the_prompt_follows_the_prefix(coder: LiveServer) -> None:
    extra = [{"filename": "a.py", "text": "x = 1\n"}, {"text": "y"}]
    found = submitted(coder, "/infill", input_prefix="p", prompt="q", input_suffix="s", input_extra=extra)
    assert found == "<|file_sep|>a.py\nx = 1\n<|file_sep|>tmp\ny<|fim_prefix|>pq<|fim_suffix|>s<|fim_middle|>"


def test_special_tokens_in_the_texts_stay_text(coder: LiveServer) -> None:
    ids = coder.post("/tokenize", content="<|fim_middle|>", parse_special=True).json()["tokens"]
    assert len(ids) == 1
    text = coder.post("/v1/completions", prompt="a<|fim_middle|>", suffix="b", max_tokens=50).json()["choices"][0]["text"]
    assert text == "a<|fim_middle|>b"


@pytest.mark.parametrize("body", [{"prompt": [40, 41]}, {"prompt": ["a", [40]]}, {"prompt": "a", "echo": True, "logprobs": 1}])
def test_suffix_that_cannot_be_is_a_400(coder: LiveServer, body: dict) -> None:
    response = coder.post("/v1/completions", suffix="b", **body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] in {"suffix", "echo"}


def test_echo_of_a_prompt_with_a_suffix_is_the_prompt(coder: LiveServer) -> None:
    text = coder.post("/v1/completions", prompt="ab", suffix="cd", echo=True, max_tokens=50).json()["choices"][0]["text"]
    assert text == "ab" + "abcd"
