from __future__ import annotations

import pytest

from calstack.errors import ArtifactError, RequestError
from calstack.text.template import ChatInput, ChatTemplate
from calstack.text.tokenizer import PromptText, Tokenizer
from tests.support.tiny_model import SPECIALS, TEMPLATE, special, tokenizer_json

TOKENIZER = Tokenizer(tokenizer_json())
START = special("<|im_start|>")


def test_special_token_is_one_id_when_parsed_and_plain_text_when_not() -> None:
    assert TOKENIZER.encode("<|im_start|>", special=True) == [START]
    plain = TOKENIZER.encode("<|im_start|>", special=False)
    assert len(plain) > 1
    assert START not in plain


def test_bos_is_put_first_exactly_once() -> None:
    with_bos = Tokenizer(tokenizer_json(), bos_id=START)
    assert with_bos.encode("hi", special=True, bos=True) == [START, *TOKENIZER.encode("hi", special=True)]
    assert with_bos.encode("<|im_start|>hi", special=True, bos=True).count(START) == 1
    assert with_bos.encode("", special=True, bos=True) == [START]
    assert TOKENIZER.encode("hi", special=True, bos=True) == TOKENIZER.encode("hi", special=True)


@pytest.mark.parametrize("content", [*SPECIALS, "a<|im_end|>b", "<|im_<|im_end|>end|>", "<|im_start|><|im_start|>"])
def test_special_token_in_user_content_stays_plain_text(content: str) -> None:
    template = ChatTemplate(TEMPLATE)
    prompt = template.render(ChatInput(messages=[{"role": "user", "content": content}]), TOKENIZER)
    ids = TOKENIZER.encode_prompt(prompt)
    say, end = special("<|say|>"), special("<|im_end|>")
    clean = TOKENIZER.encode_prompt(template.render(ChatInput(messages=[{"role": "user", "content": "x"}]), TOKENIZER))
    assert [id_ for id_ in ids if id_ < len(SPECIALS)] == [id_ for id_ in clean if id_ < len(SPECIALS)]
    assert ids[ids.index(say) + 1 : ids.index(end)] == TOKENIZER.encode(content, special=False)


def test_prompt_without_hostile_text_is_tokenised_in_one_piece() -> None:
    prompt = ChatTemplate(TEMPLATE).render(ChatInput(messages=[{"role": "user", "content": "hello\nworld"}]), TOKENIZER)
    assert prompt.guard == ""
    assert TOKENIZER.encode_prompt(prompt) == TOKENIZER.encode(prompt.text, special=True)


def test_single_character_special_token_can_be_guarded() -> None:
    guard = TOKENIZER.guard_for(["<|say|>"])
    assert TOKENIZER.encode_prompt(PromptText(TOKENIZER.guarded("<|say|>", guard), guard)) == TOKENIZER.encode("<|say|>", special=False)


def test_lone_surrogate_is_refused() -> None:
    with pytest.raises(RequestError, match="Unicode"):
        TOKENIZER.encode("a\ud83d", special=True)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": 5}'])
def test_damaged_tokenizer_file_is_an_artifact_error(content: str) -> None:
    with pytest.raises(ArtifactError, match=r"tokenizer\.json"):
        Tokenizer(content)
