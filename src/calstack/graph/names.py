"""The semantic names of a decoder graph's inputs and outputs, and of the metadata its initializers carry."""

from __future__ import annotations

import re

__all__ = [
    "CUR_LEN",
    "EMBEDDING",
    "EMBEDS",
    "HIDDEN",
    "INPUT_IDS",
    "INV_FREQ",
    "KIND_KEY",
    "LOCAL_INV_FREQ",
    "LOGITS",
    "PAST_LEN",
    "POSITIONS",
    "SCORES",
    "TYPE_IDS",
    "is_kv",
    "kv_in",
    "kv_number",
    "kv_out",
]

INPUT_IDS = "input_ids"
POSITIONS = "positions"
PAST_LEN = "past_kv_cur_seq_len"
LOGITS = "logits"
TYPE_IDS = "token_type_ids"
CUR_LEN = "cur_seq_len"
HIDDEN, EMBEDDING, SCORES = "hidden", "embedding", "scores"  # of an encoder
EMBEDS = "embeds"  # reserved
INV_FREQ = "inv_freq"
LOCAL_INV_FREQ = "inv_freq.local"  # of layers with a sliding window, where theirs differs
KIND_KEY = "calstack.kind"  # initializer metadata: how the source stores it

_KV = re.compile(r"kv\.(\d{1,6})\.([kv])(\.out)?")


def kv_in(layer: int, which: str) -> str:
    """Name of the past of layer `layer`; `which` is "k" or "v"."""
    return f"kv.{layer}.{which}"


def kv_out(layer: int, which: str) -> str:
    """Name of the past with this call's positions appended."""
    return f"kv.{layer}.{which}.out"


def is_kv(name: str) -> bool:
    """True for names of KV inputs and outputs."""
    return _KV.fullmatch(name) is not None


def kv_number(name: str) -> int | None:
    """The layer number in a KV name, None for other names."""
    match = _KV.fullmatch(name)
    return int(match[1]) if match else None
