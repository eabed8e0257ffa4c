"""An encoder as a GGUF file: names, metadata, tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from calstack.errors import SourceError, UnsupportedError
from calstack.frontends import open_source
from calstack.graph.encode import run_encoder
from calstack.specs import EncoderSpec
from tests.support.gguf_files import DATA, gguf_bytes, quantise

NAMES = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
    "pooler.dense": "cls",
    "classifier": "cls.output",
}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁play", "ing", "▁the", "▁un", "play", "▁.", "▁a"]


def short(name: str) -> str:
    stem, _, kind = name.removeprefix("bert.").rpartition(".")
    rest = stem.partition("layer.")[2]
    layer, _, rest = rest.partition(".")
    return f"blk.{layer}.{NAMES[rest]}.{kind}" if rest else f"{NAMES[stem]}.{kind}"


def write(path: Path, pooling: int = 4, **changed: Any) -> Path:
    weights = load_file(DATA / "tiny-bert/model.safetensors")
    tensors = {short(name): ("F32", array.shape, quantise("F32", array)) for name, array in weights.items()}
    if pooling == 4:  # one label
        for part in ("weight", "bias"):
            kept = weights[f"classifier.{part}"][:1]
            tensors[f"cls.output.{part}"] = ("F32", kept.shape, quantise("F32", kept))
    else:
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("cls.output")}
    fillers = [f"▁f{index}" for index in range(320 - len(WORDS))]
    metadata = {
        "general.architecture": "bert",
        "bert.block_count": 2,
        "bert.context_length": 64,
        "bert.embedding_length": 32,
        "bert.feed_forward_length": 64,
        "bert.attention.head_count": 4,
        "bert.attention.layer_norm_epsilon": 1e-12,
        "bert.attention.causal": False,
        "bert.pooling_type": pooling,
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": WORDS + fillers,
        "tokenizer.ggml.token_type": [3] * 4 + [1] * 316,
        "tokenizer.ggml.token_type_count": 2,
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.cls_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
    }
    path.write_bytes(gguf_bytes(metadata | {key.replace("__", "."): value for key, value in changed.items()}, tensors))
    return path


def test_a_reranker_gives_the_scores_of_transformers(tmp_path: Path) -> None:
    vectors = load_file(DATA.parent / "golden/models/tiny-bert.safetensors")
    rows, types = ([r[:n].tolist() for r, n in zip(vectors[key], vectors["lengths"], strict=True)] for key in ("ids", "types"))
    found = run_encoder(open_source(write(tmp_path / "m.gguf")), rows, types)
    assert np.abs(found["scores"] - vectors["scores"][:, :1]).max() <= 1e-5 * np.abs(vectors["scores"]).max()


def test_pooling_comes_from_the_metadata(tmp_path: Path) -> None:
    bundle = open_source(write(tmp_path / "m.gguf", pooling=1))
    assert bundle.spec.encoder == EncoderSpec(types=2, positions=64, pooling="mean", normalise=True)
    found = run_encoder(bundle, [[2, 4, 5, 3]])
    np.testing.assert_allclose(np.linalg.norm(found["embedding"], axis=1), 1.0, rtol=1e-6)


def test_pieces_are_those_of_the_vocabulary(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_buffer(open_source(write(tmp_path / "m.gguf")).tokenizer_json)
    assert tokenizer.encode("The unplaying.").tokens == ["[CLS]", "the", "un", "##play", "##ing", ".", "[SEP]"]
    assert tokenizer.encode("a", "zebra").ids == [2, 10, 3, 1, 3]
    assert tokenizer.encode("a", "zebra").type_ids == [0, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"pooling": 3}, UnsupportedError, "pooling"),
        ({"bert__attention__causal": True}, UnsupportedError, "causal"),
        ({"tokenizer__ggml__cls_token_id": 4000}, SourceError, "cls_token_id"),
    ],
)
def test_what_is_not_supported_says_so(tmp_path: Path, changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        open_source(write(tmp_path / "m.gguf", **changed))
