"""What a ModelSpec read from an untrusted source may be, whatever the source."""

from __future__ import annotations

from typing import TYPE_CHECKING

from calstack.frontends.reading import bad

if TYPE_CHECKING:
    from pathlib import Path

    from calstack.specs import ModelSpec

__all__ = [
    "MAX_CONTEXT",
    "MAX_HEADS",
    "MAX_HEAD_DIM",
    "MAX_LAYERS",
    "MAX_TEMPLATE_BYTES",
    "MAX_VOCAB",
    "MAX_WIDTH",
    "check_relations",
]

MAX_LAYERS = 1024
MAX_WIDTH = 1 << 18  # hidden and intermediate
MAX_HEADS = 1024
MAX_HEAD_DIM = 1024
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
    if spec.rope.scaling == "llama3" and spec.rope.high_freq_factor <= spec.rope.low_freq_factor:
        bad(path, "rope scaling", "the high frequency factor is not above the low one")
    for name, ids in (("bos", spec.bos_ids), ("eos", spec.eos_ids), ("pad", (spec.pad_id,) if spec.pad_id is not None else ())):
        for token in ids:
            if not 0 <= token < spec.vocab:
                bad(path, f"{name} token", f"the id {token} is not in the vocabulary of {spec.vocab}")
