"""Texts, golden files and the small safetensors code."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load as load_safetensors

from calstack.errors import ArtifactError, UsageError
from calstack.quality.card import card_windows
from calstack.quality.goldens import Case, case_ids, read_cases, write_cases
from calstack.quality.tensors import load_tensors, save_tensors
from calstack.quality.text import WINDOW, QualityText, bundled_text, encode, token_windows

TOKENIZER = (Path(__file__).parents[2] / "data" / "tiny-llama" / "tokenizer.json").read_bytes()
VOCAB = 100


def test_bundled_text_is_the_one_the_notice_beside_it_describes() -> None:
    text = bundled_text()
    assert text.sha256 == "bd9c4ae3164f5ccaf26611f97d7d3b7e622da84be8b7d677a1a370a8c7dd0437"
    assert text.text.count("\n\n") == 5


def test_windows_follow_each_other_without_overlap() -> None:
    windows = token_windows(bundled_text(), TOKENIZER, most=3, bos=None)
    ids = encode(TOKENIZER, bundled_text().text)
    assert windows.shape == (3, WINDOW)
    assert windows.reshape(-1).tolist() == ids[: 3 * WINDOW]


def test_bos_starts_the_text_and_every_window() -> None:
    windows = token_windows(bundled_text(), TOKENIZER, most=2, bos=7)
    ids = encode(TOKENIZER, bundled_text().text)
    assert windows[:, 0].tolist() == [7, 7]
    assert windows[0, 1:].tolist() == ids[: WINDOW - 1]
    assert windows[1, 1:].tolist() == ids[WINDOW : 2 * WINDOW - 1]


def test_text_of_less_than_two_windows_is_refused() -> None:
    with pytest.raises(UsageError, match="at least 1024"):
        token_windows(QualityText("short", "one two three"), TOKENIZER, most=3, bos=None)


@pytest.mark.parametrize(("macs", "windows"), [(1e6, 8), (1.34e8, 7), (1e9, 2), (1e12, 2)])
def test_number_of_windows_depends_on_the_model_alone(macs: float, windows: int) -> None:
    assert card_windows(macs) == windows


def cases() -> list[Case]:
    rng = np.random.default_rng(1)
    made = []
    for ids in case_ids(rng.integers(0, VOCAB, 40).tolist()):
        rows = np.arange(max(len(ids) - 8, 0), len(ids), dtype=np.int32)
        top = np.stack([rng.permutation(VOCAB)[:64] for _ in rows]).astype(np.int32)
        values = rng.standard_normal(top.shape).astype(np.float32)
        made.append(Case(np.asarray(ids, np.int32), rows, top, values, rng.standard_normal(len(rows))))
    return made


def test_golden_file_comes_back_and_other_readers_take_it() -> None:
    made = cases()
    data = write_cases(made)
    for ours, back in zip(made, read_cases(data, "g", VOCAB), strict=True):
        np.testing.assert_array_equal(ours.input_ids, back.input_ids)
        np.testing.assert_array_equal(ours.top_logits, back.top_logits)
    np.testing.assert_array_equal(load_safetensors(data)["1.lse"], made[1].lse)


def changed(name: str, array: Any) -> bytes:
    tensors = dict(load_tensors(write_cases(cases()), "g"))
    tensors[name] = array
    return save_tensors(tensors)


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("0.input_ids", np.array([VOCAB], np.int32)),
        ("0.input_ids", np.zeros((3, 3), np.int32)),
        ("0.input_ids", np.zeros(2000, np.int32)),
        ("0.top_ids", np.full((8, 64), -1, np.int32)),
        ("0.top_ids", np.zeros((8, 3), np.int32)),
        ("0.rows", np.arange(8, dtype=np.int32)),
        ("0.rows", np.zeros(8, np.int32)),
        ("0.lse", np.zeros(3)),
        ("0.top_logits", np.zeros((8, 64), np.int32)),
    ],
)
def test_golden_case_out_of_range_is_refused(name: str, array: Any) -> None:
    with pytest.raises(ArtifactError, match="out of range"):
        read_cases(changed(name, array), "golden/x", VOCAB)


def test_golden_file_without_a_tensor_is_refused() -> None:
    tensors = dict(load_tensors(write_cases(cases()), "g"))
    del tensors["1.lse"]
    with pytest.raises(ArtifactError, match=r"1\.lse"):
        read_cases(save_tensors(tensors), "golden/x", VOCAB)


@pytest.mark.parametrize(
    ("old", "new"),
    [(b"I32", b"X32"), (b'"shape":[9]', b'"shape":[8]'), (b"[0,36]", b"[9,45]"), (b"[0,36]", b"[0,-6]"), (b'"0.rows"', b'"0.rows')],
)
def test_damaged_header_is_refused(old: bytes, new: bytes) -> None:
    data = write_cases(cases())
    assert old in data
    with pytest.raises(ArtifactError):
        read_cases(data.replace(old, new, 1), "golden/x", VOCAB)


@pytest.mark.parametrize("size", [0, 3, 8, 100, 900])
def test_truncated_golden_file_is_refused(size: int) -> None:
    with pytest.raises(ArtifactError):
        read_cases(write_cases(cases())[:size], "golden/x", VOCAB)
