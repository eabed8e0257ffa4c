"""What lies in a directory that `keep_onnx` wrote.

prefill.onnx, decode.onnx   the graphs (an encoder has encode.onnx alone); float weights are external data in weights.bin
weights.bin                 f32 weights, each at a multiple of 4096 bytes: onnxruntime maps it
stored.bin                  the source's stored bytes of every weight that is not plain f32
index.json                  ModelSpec, source, generation defaults, and per weight the hash of the floats it stands for
tokenizer.json, chat_template.jinja
"""

from __future__ import annotations

import msgspec

from calstack.calbin.manifest import SourceInfo
from calstack.specs import ModelSpec, Role

__all__ = [
    "ALIGNMENT",
    "FILES",
    "FORMAT",
    "GRAPHS",
    "INDEX",
    "STORED",
    "TEMPLATE",
    "TOKENIZER",
    "WEIGHTS",
    "Entry",
    "Index",
]

FORMAT = 1
ALIGNMENT = 4096
GRAPHS = {role: f"{role}.onnx" for role in (Role.PREFILL, Role.DECODE, Role.ENCODE)}
WEIGHTS, STORED = "weights.bin", "stored.bin"
INDEX, TOKENIZER, TEMPLATE = "index.json", "tokenizer.json", "chat_template.jinja"
FILES = frozenset({*GRAPHS.values(), WEIGHTS, STORED, INDEX, TOKENIZER, TEMPLATE})


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A weight: its floats are `float_bytes` long at `float_offset` of weights.bin; stored bytes lie in stored.bin.

    `stored_offset` is -1 for plain f32, whose stored bytes are the floats themselves.
    """

    kind: str
    shape: tuple[int, ...]
    sha256: str  # of the f32 data, little endian
    float_offset: int
    float_bytes: int
    stored_offset: int
    stored_bytes: int


class Index(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """index.json."""

    format: int
    producer: str
    spec: ModelSpec
    source: SourceInfo
    generation: dict[str, object]
    tensors: dict[str, Entry]
