"""What a ModelSpec read from an untrusted source may be, whatever the source."""

from __future__ import annotations

import math
from pathlib import Path

from calstack.frontends.reading import bad
from calstack.specs import ModelSpec

__all__ = [
    "MAX_CONTEXT",
    "MAX_EXPERTS",
    "MAX_HEADS",
    "MAX_HEAD_DIM",
    "MAX_LABELS",
    "MAX_LAYERS",
    "MAX_TEMPLATE_BYTES",
    "MAX_TYPES",
    "MAX_VOCAB",
    "MAX_WIDTH",
    "check_relations",
    "check_spec",
]

MAX_LAYERS = 1024
MAX_WIDTH = 1 << 18  # hidden and intermediate
MAX_HEADS = 1024
MAX_HEAD_DIM = 1024
MAX_EXPERTS = 1024
MAX_TYPES = 1024
MAX_LABELS = 1 << 16
MAX_VOCAB = 1 << 22
MAX_CONTEXT = 1 << 24
MAX_TEMPLATE_BYTES = 1 << 20


def check_relations(spec: ModelSpec, path: Path) -> None:
    """Relations between fields that were range-checked one by one."""
    if spec.heads % spec.kv_heads:
        bad(path, "heads", f"{spec.heads} query heads are not a multiple of {spec.kv_heads} key heads")
    if spec.head_dim % 2:
        bad(path, "head_dim", f"{spec.head_dim} is odd")
    if spec.rope.dim % 2 or not 2 <= spec.rope.dim <= spec.head_dim:
        bad(path, "rope dimension", f"{spec.rope.dim} is not an even number up to the head size {spec.head_dim}")
    if spec.moe is not None and spec.moe.top_k > spec.moe.experts:
        bad(path, "experts", f"{spec.moe.top_k} of {spec.moe.experts} experts cannot be chosen")
    if spec.rope.scaling == "llama3" and spec.rope.high_freq_factor <= spec.rope.low_freq_factor:
        bad(path, "rope scaling", "the high frequency factor is not above the low one")
    for name, ids in (("bos", spec.bos_ids), ("eos", spec.eos_ids), ("pad", (spec.pad_id,) if spec.pad_id is not None else ())):
        for token in ids:
            if not 0 <= token < spec.vocab:
                bad(path, f"{name} token", f"the id {token} is not in the vocabulary of {spec.vocab}")


def check_spec(spec: ModelSpec, path: Path) -> None:
    """All of it, for a spec that was read as a whole."""
    integers = {
        "layers": (spec.layers, MAX_LAYERS),
        "hidden": (spec.hidden, MAX_WIDTH),
        "intermediate": (spec.intermediate, MAX_WIDTH),
        "heads": (spec.heads, MAX_HEADS),
        "kv_heads": (spec.kv_heads, MAX_HEADS),
        "head_dim": (spec.head_dim, MAX_HEAD_DIM),
        "vocab": (spec.vocab, MAX_VOCAB),
        "context": (spec.context, MAX_CONTEXT),
    }
    if spec.moe is not None:
        integers["moe.experts"] = (spec.moe.experts, MAX_EXPERTS)
        integers["moe.top_k"] = (spec.moe.top_k, MAX_EXPERTS)
        integers["moe.intermediate"] = (spec.moe.intermediate, MAX_WIDTH)
    if spec.encoder is not None:
        integers["encoder.types"] = (spec.encoder.types, MAX_TYPES)
        integers["encoder.positions"] = (spec.encoder.positions, MAX_CONTEXT)
        integers["encoder.labels"] = (len(spec.encoder.labels) + 1, MAX_LABELS + 1)
    if spec.sliding_window or spec.full_attention_every:
        integers["sliding_window"] = (spec.sliding_window, MAX_CONTEXT)
        integers["full_attention_every"] = (spec.full_attention_every + 1, MAX_LAYERS + 1)
    for name, (value, high) in integers.items():
        if not 1 <= value <= high:
            bad(path, f"spec.{name}", f"{value} is not from 1 to {high}")
    for name, number in (("norm_eps", spec.norm_eps), ("rope.theta", spec.rope.theta), ("rope.factor", spec.rope.factor)):
        if not math.isfinite(number) or number <= 0:
            bad(path, f"spec.{name}", f"{number} is not a positive number")
    check_relations(spec, path)
