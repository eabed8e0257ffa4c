"""Encoder calbins made of the tiny bert: a sentence encoder, and a cross-encoder of one class."""

from __future__ import annotations

from pathlib import Path

import msgspec
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from calstack import api
from calstack.frontends import open_source
from calstack.graph.model import GraphBundle
from calstack.specs import QuantSpec, WeightFormat
from tests.support.gguf_files import DATA

__all__ = ["bundle_of", "cross_encoder", "encoder_calbin", "sentence_encoder"]


def _copied(directory: Path, **config: object) -> Path:
    directory.mkdir(parents=True)
    for file in (DATA / "tiny-bert").iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    old = msgspec.json.decode((directory / "config.json").read_bytes(), type=dict[str, object])
    (directory / "config.json").write_bytes(msgspec.json.encode(old | config))
    _frame_texts(directory / "tokenizer.json")
    return directory


def _frame_texts(path: Path) -> None:
    """As BERT's: a token before a text and one behind it and behind the second of a pair."""
    tokenizer = Tokenizer.from_file(str(path))
    begin, end = "<|im_start|>", "<|im_end|>"
    tokenizer.post_processor = TemplateProcessing(
        single=f"{begin} $A {end}",
        pair=f"{begin} $A {end} $B:1 {end}:1",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in (begin, end)],
    )
    tokenizer.save(str(path))


def sentence_encoder(directory: Path, pooling: str = "mean", *, normalise: bool = True, longest: int = 48) -> Path:
    """The tiny encoder as a sentence-transformers directory."""
    _copied(directory, architectures=["BertModel"])
    (directory / "1_Pooling").mkdir()
    weights = load_file(directory / "model.safetensors")
    save_file({name: array for name, array in weights.items() if not name.startswith("classifier")}, directory / "model.safetensors")
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")] if normalise else [])]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"} for i, (path, kind) in enumerate(kinds)
    ]
    (directory / "modules.json").write_bytes(msgspec.json.encode(modules))
    modes = {f"pooling_mode_{mode}": mode.startswith(pooling) for mode in ("cls_token", "mean_tokens", "max_tokens")}
    (directory / "1_Pooling/config.json").write_bytes(msgspec.json.encode({"word_embedding_dimension": 32} | modes))
    (directory / "sentence_bert_config.json").write_bytes(msgspec.json.encode({"max_seq_length": longest}))
    return directory


def cross_encoder(directory: Path, classes: int = 1) -> Path:
    """The tiny classifier with its first `classes` classes."""
    _copied(directory, id2label={str(i): f"LABEL_{i}" for i in range(classes)}, label2id={f"LABEL_{i}": i for i in range(classes)})
    weights = load_file(directory / "model.safetensors")
    cut = {name: array[:classes].copy() if name.startswith("classifier") else array for name, array in weights.items()}
    save_file(cut, directory / "model.safetensors")
    return directory


def encoder_calbin(source: Path, out: Path, fmt: WeightFormat = WeightFormat.F32) -> Path:
    """Compiled, with goldens."""
    return api.compile_model(source, out, options=api.CompileOptions(quant=QuantSpec(default=fmt), batches=(1, 4), quality=False))


def bundle_of(source: Path) -> GraphBundle:
    """For the oracle."""
    return open_source(source)
