from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from calstack.errors import SourceError, UnsupportedError
from calstack.frontends import open_source
from tests.support.gguf_files import DATA

Weights = dict[str, np.ndarray]


SLIDING = {"use_sliding_window": True, "sliding_window": 64, "layer_types": None, "max_window_layers": 0}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    shutil.copytree(DATA / "tiny-qwen3", tmp_path / "m")
    return tmp_path / "m"


def reconfigure(directory: Path, name: str = "config.json", **changed: Any) -> None:
    path = directory / name
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({key: item for key, item in (values | changed).items() if item is not ...}))


def reweigh(directory: Path, change: Callable[[Weights], object]) -> None:
    weights = {name: tensor.float32() for name, tensor in open_source(directory).tensors.items()}
    change(weights)
    save_file(weights, directory / "model.safetensors")


def test_a_directory_is_read(directory: Path) -> None:
    reconfigure(directory, "generation_config.json", eos_token_id=[2, 0], temperature=0.6, top_k=20, do_sample=True)
    bundle = open_source(directory)
    assert bundle.spec.eos_ids == (2, 0)
    assert bundle.generation == {"eos_token_id": [2, 0], "temperature": 0.6, "top_k": 20, "do_sample": True}
    assert bundle.chat_template.startswith("{% for message")
    assert {file.name for file in bundle.source.files} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert list(bundle.tensors)[:2] == ["model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"]


def test_shards_give_what_one_file_gives(directory: Path) -> None:
    whole = open_source(directory)
    names = sorted(whole.tensors)
    weight_map = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({n: whole.tensors[n].float32() for n in names if weight_map[n] == file}, directory / file)
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    sharded = open_source(directory)
    assert list(sharded.tensors) == list(whole.tensors)
    assert all(np.array_equal(sharded.tensors[n].float32(), whole.tensors[n].float32()) for n in names)


@pytest.mark.parametrize("file", ["../m2/model.safetensors", "/etc/passwd", "a/../../x", ""])
def test_a_shard_outside_the_directory_is_refused(directory: Path, file: str) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": file}}))
    with pytest.raises(SourceError, match=r"weight_map.model.norm.weight.*outside"):
        open_source(directory)


@pytest.mark.parametrize(("weight_map", "message"), [({"a": "gone.safetensors"}, "gone"), ({"a": 1}, "weight_map.a"), ([], "weight_map")])
def test_a_broken_index_is_refused(directory: Path, weight_map: object, message: str) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(SourceError, match=message):
        open_source(directory)


def test_an_index_entry_that_its_shard_lacks_is_refused(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"ghost": "model.safetensors"}}))
    with pytest.raises(SourceError, match="'ghost'"):
        open_source(directory)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rms_norm_eps": float("nan")}, r"rms_norm_eps: nan is not a number"),
        ({"rms_norm_eps": ...}, "rms_norm_eps: the key is missing"),
        ({"hidden_size": 63}, "shape is"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"hidden_size": 1e300}, "hidden_size"),
        ({"num_hidden_layers": 1000}, "1000 layers are promised, the weights hold 3"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"head_dim": 31}, "odd"),
        ({"vocab_size": 300}, "largest token id is 319"),
        ({"eos_token_id": 999}, "eos_token_id"),
        ({"rope_parameters": {"rope_theta": float("inf")}}, "rope_parameters.rope_theta"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope_parameters.low_freq_factor"),
        ({"rope_parameters": 5}, "rope_parameters: not an object"),
    ],
)
def test_a_wrong_config_is_refused_by_field(directory: Path, changed: dict[str, Any], message: str) -> None:
    reconfigure(directory, **changed)
    with pytest.raises(SourceError, match=message):
        open_source(directory)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"hidden_act": "relu"}, "relu"),
        ({"hidden_act": "gelu"}, "activation"),
        (SLIDING | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "no regular pattern"),
        (SLIDING | {"max_window_layers": 1}, "no regular pattern"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 16}}, "beta_fast"),
    ],
)
def test_what_is_not_supported_says_so(directory: Path, changed: dict[str, Any], message: str) -> None:
    reconfigure(directory, **changed)
    with pytest.raises(UnsupportedError, match=message):
        open_source(directory)


def test_older_rope_fields_mean_the_same(directory: Path) -> None:
    scaled = {"rope_type": "linear", "factor": 2.0}
    reconfigure(directory, rope_parameters={"rope_theta": 5000.0} | scaled)
    new = open_source(directory).spec.rope
    reconfigure(directory, rope_parameters=..., rope_theta=5000.0, rope_scaling={"type": "linear", "factor": 2.0})
    assert open_source(directory).spec.rope == new


def test_a_missing_tensor_is_named(directory: Path) -> None:
    reweigh(directory, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(SourceError, match=r"model\.layers\.1\.mlp\.up_proj\.weight.*missing"):
        open_source(directory)


def test_a_tensor_of_the_wrong_shape_is_named(directory: Path) -> None:
    reweigh(directory, lambda weights: weights.update({"model.norm.weight": np.ones(32, np.float32)}))
    with pytest.raises(SourceError, match=r"model\.norm\.weight.*\[32\], expected \[64\]"):
        open_source(directory)


def test_a_tensor_without_a_place_in_the_graph_is_unsupported(directory: Path) -> None:
    reweigh(directory, lambda weights: weights.update({"model.extra.weight": np.ones(1, np.float32)}))
    with pytest.raises(UnsupportedError, match=r"model\.extra\.weight"):
        open_source(directory)


def test_derived_frequencies_of_old_checkpoints_are_ignored(directory: Path) -> None:
    reweigh(directory, lambda weights: weights.update({"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(16, np.float32)}))
    assert len(open_source(directory).tensors) == len(open_source(DATA / "tiny-qwen3").tensors)


def test_a_tied_head_that_equals_the_embedding_is_dropped(directory: Path) -> None:
    reweigh(directory, lambda weights: weights.update({"lm_head.weight": weights["model.embed_tokens.weight"].copy()}))
    assert "lm_head.weight" not in open_source(directory).tensors


def test_a_tied_head_that_differs_is_refused(directory: Path) -> None:
    reweigh(directory, lambda weights: weights.update({"lm_head.weight": weights["model.embed_tokens.weight"] + 1}))
    with pytest.raises(SourceError, match=r"lm_head\.weight.*differ"):
        open_source(directory)


def test_an_untied_config_needs_the_head(directory: Path) -> None:
    reconfigure(directory, tie_word_embeddings=False)
    with pytest.raises(SourceError, match=r"lm_head\.weight.*missing"):
        open_source(directory)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_a_json_file_that_is_none_is_refused_by_name(directory: Path, file: str) -> None:
    (directory / file).write_text('{"a": ')
    with pytest.raises(SourceError, match=file.replace(".", r"\.")):
        open_source(directory)


@pytest.mark.parametrize("file", ["tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(directory: Path, file: str) -> None:
    (directory / file).unlink()
    with pytest.raises(SourceError, match=file.replace(".", r"\.")):
        open_source(directory)


def test_a_template_file_goes_before_the_config(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("from the file")
    assert open_source(directory).chat_template == "from the file"


def test_named_templates_give_the_default_one(directory: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    reconfigure(directory, "tokenizer_config.json", chat_template=named)
    assert open_source(directory).chat_template == "d"


def test_add_bos_is_what_the_tokenizer_does(directory: Path) -> None:
    assert not open_source(directory).spec.add_bos
    path = directory / "tokenizer.json"
    values = json.loads(path.read_text())
    values["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    path.write_text(json.dumps(values))
    assert open_source(directory).spec.add_bos
