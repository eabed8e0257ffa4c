"""Makes the tiny random models of tests/data and the logits of tests/golden/models, by transformers in f32.

    python -m venv /tmp/reference && /tmp/reference/bin/pip install torch==2.13.0 transformers==5.24.0
    /tmp/reference/bin/python tools/make_reference_vectors.py [--check]

`--check` compares the committed vectors with fresh ones instead of writing. Weights are scaled so that the model is sensitive:
the script fails unless removing rope, or attention, moves the logits by more than 10 % of the largest.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

ROOT = Path(__file__).resolve().parent.parent
DATA, GOLDEN = ROOT / "tests/data", ROOT / "tests/golden/models"
VOCAB = 320
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
CHUNKS = (100, 28) + (1,) * 32  # prefill, prefill over a chunk border, then decode

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 3,
    "dtype": "float32",
}
MODELS: dict[str, dict[str, Any]] = {
    "tiny-llama": {"model_type": "llama", "tie_word_embeddings": False, "head_dim": 16, "rms_norm_eps": 1e-5, "rope_theta": 10000.0},
    "tiny-qwen3": {"model_type": "qwen3", "tie_word_embeddings": True, "head_dim": 32, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0},
}
# Smaller still: one model per further architecture, every part of it sensitive.
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MODELS |= {
    "tiny-mistral": SMALL | {"model_type": "mistral", "sliding_window": 24, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "head_dim": 16},
    "tiny-qwen2": SMALL | {"model_type": "qwen2", "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0},
    "tiny-phi3": SMALL
    | {
        "model_type": "phi3",
        "sliding_window": 40,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _ROPE | {"partial_rotary_factor": 0.75},
        "head_dim": 16,
    },
    "tiny-gemma3": SMALL
    | {
        "model_type": "gemma3_text",
        "num_hidden_layers": 3,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 12,
        "final_logit_softcapping": 12.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000000.0},
            "sliding_attention": _ROPE,
        },
    },
    "tiny-qwen3-moe": SMALL
    | {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
    },
    "tiny-mixtral": SMALL
    | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "rope_theta": 10000.0},
}
ENCODER: dict[str, Any] = {
    "model_type": "bert",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
    "num_labels": 3,
    "pad_token_id": 3,
    "hidden_act": "gelu",
}
STORED = {"tiny-llama": torch.bfloat16, "tiny-qwen3": torch.float32, "tiny-bert": torch.float32}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
}
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TEXT = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, it was the "
    "epoch of belief, it was the epoch of incredulity, it was the season of Light, it was the season of Darkness, it was the "
    "spring of hope, it was the winter of despair, we had everything before us, we had nothing before us."
)


def make_model(name: str) -> Any:
    """A seeded random model, sensitive to every part, with weights that its storage type holds exactly."""
    config = AutoConfig.for_model(**(COMMON | MODELS[name]), attn_implementation="eager")
    return fill(name, AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())


def fill(name: str, model: Any) -> Any:
    """Draw the weights."""
    config = model.config
    config.architectures = [type(model).__name__]
    generator = torch.Generator().manual_seed(20240607)
    for key, weight in model.named_parameters():
        drawn = torch.randn(weight.shape, generator=generator)
        if weight.ndim == 1:
            scaled = 0.3 * drawn + (0.0 if key.endswith("bias") or config.model_type == "gemma3_text" else 1.0)
        else:
            scaled = drawn * gain(key) * weight.shape[-1] ** -0.5
        weight.data.copy_(scaled.to(stored(name)).float())
    return model


def stored(name: str) -> torch.dtype:
    """The element type of the committed weights."""
    return STORED.get(name, torch.bfloat16)


def gain(key: str) -> float:
    """Sharp attention (large q and k) that matters (large o), so that no part can be dropped unnoticed."""
    if key.endswith(("q_proj.weight", "k_proj.weight", "qkv_proj.weight", "mlp.gate.weight")):
        return 1.5
    return {"embed_tokens": 4.0, "o_proj": 1.5}.get(key.split(".")[-2], 1.0)


def logits_of(model: Any, ids: np.ndarray, chunks: tuple[int, ...]) -> np.ndarray:
    """Logits [n, vocab] by calls of the given sizes with a cache."""
    cache, rows, start = None, [], 0
    for size in chunks:
        with torch.no_grad():
            out = model(input_ids=torch.from_numpy(ids[None, start : start + size]), cache=cache, use_cache=True)
        cache, start = out.cache, start + size
        rows.append(out.logits[0].numpy())
    return np.concatenate(rows)


def check_sensitive(model: Any, ids: np.ndarray, expected: np.ndarray) -> None:
    """Fail unless rope and attention each matter."""
    for what, weights in parts(model).items():
        kept = [weight.data.clone() for weight in weights]
        for weight in weights:
            weight.data.zero_()
        changed = logits_of(model, ids, CHUNKS)
        for weight, old in zip(weights, kept, strict=True):
            weight.data.copy_(old)
        moved = float(np.abs(changed - expected).max() / np.abs(expected).max())
        print(f"  removing {what} moves logits by {moved:.0%}")
        if moved <= 0.10:
            sys.exit(f"not sensitive to {what}")


def parts(model: Any) -> dict[str, list[Any]]:
    """What must matter, as tensors to set to zero: frequencies, attention outputs, router, biases."""
    named = dict(model.named_parameters())
    buffers = {key: value for key, value in model.named_buffers() if key.endswith("inv_freq") and "original" not in key}
    found = {f"rope {key.rpartition('.')[2]}": [value] for key, value in buffers.items()}
    found["attention"] = [value for key, value in named.items() if key.endswith("o_proj.weight")]
    found["router"] = [value for key, value in named.items() if key.endswith("mlp.gate.weight")]
    found["biases"] = [value for key, value in named.items() if key.endswith("bias")]
    return {what: tensors for what, tensors in found.items() if tensors}


def make_tokenizer() -> Tokenizer:
    """Byte-level BPE: four special tokens, 256 bytes, the rest merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, initial_alphabet=sorted(alphabet), special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL]
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    assert tokenizer.get_vocab_size() == VOCAB
    return tokenizer


def encoder_vectors(model: Any) -> dict[str, np.ndarray]:
    """Two padded pairs of texts: ids, segments, lengths, states and scores; fails unless attention, positions and segments matter."""
    ids = np.random.default_rng(8).integers(len(SPECIAL), VOCAB, (2, 40))
    lengths = np.array([40, 27])
    ids[1, lengths[1] :] = 3
    types = (np.arange(40) >= 15).astype(np.int64)[None].repeat(2, 0)
    expected = encode(model, ids, types, lengths)
    named = dict(model.named_parameters())
    for what in ("attention.output.dense.weight", "position_embeddings.weight", "token_type_embeddings.weight"):
        weights = [weight for key, weight in named.items() if key.endswith(what)]
        kept = [weight.data.clone() for weight in weights]
        for weight in weights:
            weight.data.zero_()
        changed = encode(model, ids, types, lengths)
        for weight, old in zip(weights, kept, strict=True):
            weight.data.copy_(old)
        moved = [float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(changed, expected, strict=True)]
        print(f"  removing {what} moves states by {moved[0]:.0%}, scores by {moved[1]:.0%}")
        if min(moved) <= 0.10:
            sys.exit(f"not sensitive to {what}")
    return {"ids": ids, "types": types, "lengths": lengths, "hidden": expected[0], "scores": expected[1]}


def encode(model: Any, ids: np.ndarray, types: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """States (0 where padded) and scores."""
    mask = (np.arange(ids.shape[1]) < lengths[:, None]).astype(np.int64)
    feeds = {"input_ids": ids, "token_type_ids": types, "attention_mask": mask}
    with torch.no_grad():
        out = model(**{key: torch.from_numpy(value) for key, value in feeds.items()}, output_hidden_states=True)
    return out.hidden_states[-1].numpy() * mask[..., None].astype(np.float32), out.logits.numpy()


def write_model(name: str, model: Any) -> None:
    """The HF directory."""
    directory = DATA / name
    directory.mkdir(parents=True, exist_ok=True)
    model.to(stored(name)).save_pretrained(directory)
    model.to(torch.float32)
    make_tokenizer().save(str(directory / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE, "bos_token": SPECIAL[0], "eos_token": SPECIAL[2], "pad_token": SPECIAL[3]}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def rope_vectors() -> dict[str, np.ndarray]:
    """inv_freq and attention factor of each scaled rope, head size 64, theta 500,000."""
    vectors = {}
    for name, parameters in ROPES.items():
        config = AutoConfig.for_model(
            "llama", head_dim=64, max_position_embeddings=16384, rope_parameters={"rope_theta": 500000.0} | parameters
        )
        inv_freq, factor = ROPE_INIT_FUNCTIONS[name](config, "cpu")
        vectors[f"{name}.inv_freq"] = inv_freq.float().numpy()
        vectors[f"{name}.attention_factor"] = np.array([factor], np.float32)
    return vectors


def keep(path: Path, arrays: dict[str, np.ndarray], *, check: bool) -> None:
    """Write vectors, or compare them with the committed ones."""
    if not check:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({key: np.ascontiguousarray(value) for key, value in arrays.items()}, path)
        return
    for key, old in load_file(path).items():
        worst = float(np.abs(old - arrays[key]).max() / np.abs(old).max())
        print(f"  {path.name} {key}: {worst:.1e} of the largest")
        if worst > 1e-5:
            sys.exit(f"{path}: {key} differs")


def main() -> None:
    """Make or check everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the committed files, write nothing")
    parser.add_argument("only", nargs="*", help="names of models; none = all")
    arguments = parser.parse_args()
    check, only = arguments.check, arguments.only
    torch.set_num_threads(1)
    for name in [name for name in MODELS if not only or name in only]:
        print(name)
        model = make_model(name)
        ids = np.random.default_rng(7).integers(len(SPECIAL), VOCAB, sum(CHUNKS))
        expected = logits_of(model, ids, CHUNKS)
        check_sensitive(model, ids, expected)
        keep(GOLDEN / f"{name}.safetensors", {"ids": ids, "logits": expected}, check=check)
        if not check:
            write_model(name, model)
    if not only or "tiny-bert" in only:
        print("tiny-bert")
        config = AutoConfig.for_model(**ENCODER, attn_implementation="eager")
        model = fill("tiny-bert", AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval())
        keep(GOLDEN / "tiny-bert.safetensors", encoder_vectors(model), check=check)
        if not check:
            write_model("tiny-bert", model)
    keep(GOLDEN / "rope.safetensors", rope_vectors(), check=check)


if __name__ == "__main__":
    main()
