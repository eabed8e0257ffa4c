from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from calstack.errors import SourceError, UnsupportedError
from calstack.frontends import open_source
from calstack.frontends.gguf_tokenizer import PRE, adds_bos, build_tokenizer
from calstack.frontends.metadata import Metadata
from tests.support.gguf_files import DATA, tiny_parts

VECTORS = Path(__file__).parents[2] / "golden/tokenizers"


def metadata(**changed: object) -> Metadata:
    values, _ = tiny_parts("tiny-llama", "F32")
    values["tokenizer.ggml.token_type"] = np.array(values["tokenizer.ggml.token_type"], np.int32)
    return Metadata(Path("x.gguf"), values | {f"tokenizer.ggml.{key}": item for key, item in changed.items()})


def built(**changed: object) -> Tokenizer:
    return Tokenizer.from_buffer(build_tokenizer(metadata(**changed), 320))


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe"])
def test_splits_equal_the_original_pre_tokenizer_on_a_hard_text(pre: str) -> None:
    vectors = json.loads((VECTORS / f"{pre}.json").read_text())
    tokenizer = built(pre=pre)
    for text, want in zip(vectors["texts"], vectors["splits"], strict=True):
        normal = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
        assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normal)] == want


@pytest.mark.model
def test_smollm_ids_equal_a_plain_bpe_on_a_hard_text(smollm2_gguf: Path) -> None:
    vectors = json.loads((VECTORS / "smollm.json").read_text())
    tokenizer = Tokenizer.from_buffer(open_source(smollm2_gguf).tokenizer_json)
    for text, want in zip(vectors["texts"], vectors["ids"], strict=True):
        assert tokenizer.encode(text).ids == want
        assert tokenizer.decode(want, skip_special_tokens=False) == text


def test_ids_equal_the_tokenizer_the_vocabulary_came_from() -> None:
    original = Tokenizer.from_file(str(DATA / "tiny-llama/tokenizer.json"))
    text = "It was the best of times, <|im_start|>user\nit was 1859: naïve 中文 👍🏽"
    assert built().encode(text).ids == original.encode(text).ids


def test_control_tokens_are_special_and_user_tokens_are_not() -> None:
    types = np.full(320, 1, np.int32)
    types[:4] = (3, 3, 3, 4)
    tokenizer = built(token_type=types)
    ids = tokenizer.encode("<|im_start|><|pad|>").ids
    assert ids == [1, 3]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<|pad|>"


def test_the_same_metadata_gives_the_same_bytes() -> None:
    assert build_tokenizer(metadata(), 320) == build_tokenizer(metadata(), 320)


def test_digits_stand_alone_for_smollm_only() -> None:
    split = {pre: [p for p, _ in built(pre=pre).pre_tokenizer.pre_tokenize_str("a 1234")] for pre in ("smollm", "gpt-2", "llama-bpe")}
    assert split == {"smollm": ["a", "Ġ", "1", "2", "3", "4"], "gpt-2": ["a", "Ġ1234"], "llama-bpe": ["a", "Ġ", "123", "4"]}


@pytest.mark.parametrize("pre", PRE)
def test_every_known_pre_tokenizer_round_trips(pre: str) -> None:
    text = "Hello  wörld 123\n\n中文 it's"
    tokenizer = built(pre=pre)
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_add_bos_defaults_by_pre_tokenizer() -> None:
    assert adds_bos(metadata(pre="llama-bpe"))
    assert not adds_bos(metadata(pre="smollm"))


@pytest.mark.parametrize(
    ("changed", "key"),
    [({"model": "t5"}, "tokenizer.ggml.model"), ({"pre": "martian"}, "tokenizer.ggml.pre")],
)
def test_unknown_tokenizers_are_unsupported(changed: dict[str, object], key: str) -> None:
    with pytest.raises(UnsupportedError, match=key):
        built(**changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tokens": ["a", "a"]}, "twice"),
        ({"tokens": []}, "0 tokens"),
        ({"tokens": [f"t{i}" for i in range(321)]}, "321 tokens"),
        ({"merges": ["ab"]}, "merge 0"),
        ({"merges": ["I missing"]}, "merge 0"),
        ({"merges": None}, "list of texts"),
        ({"token_type": np.ones(3, np.int32)}, "3 types"),
    ],
)
def test_broken_vocabularies_are_refused(changed: dict[str, object], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        built(**changed)
