"""The manifest of a calbin, format v1. Its JSON Schema is published in docs/reference/manifest.schema.json (`make gen`)."""

from __future__ import annotations

from typing import Literal

import msgspec

from calstack.specs import DType, KVDType, ModelSpec, Role, WeightFormat

__all__ = [
    "FORMAT_MAJOR",
    "FORMAT_MINOR",
    "KNOWN_FEATURES",
    "NUMERICS",
    "PACKED_LAYOUT",
    "WEIGHTLESS",
    "AdapterSlots",
    "Chip",
    "Compatibility",
    "Constraints",
    "FileEntry",
    "GoldenRef",
    "IOTensor",
    "KVSpec",
    "Manifest",
    "PackedTensor",
    "SourceFile",
    "SourceInfo",
    "Submodel",
    "TargetRef",
    "TensorQuant",
    "Workload",
]

FORMAT_MAJOR = 1
FORMAT_MINOR = 0
NUMERICS = 1
PACKED_LAYOUT = "n16.v1"
WEIGHTLESS = "weightless"  # programs and plan of a model without its parameters
KNOWN_FEATURES = frozenset({WEIGHTLESS})  # values of `requires` that this version understands


class _Node(msgspec.Struct, frozen=True, kw_only=True):
    """Unknown fields are ignored, so that a newer minor can be read; unknown *features* are refused (`requires`)."""


class FileEntry(_Node, frozen=True, kw_only=True):
    """A file of the calbin, path relative to it with forward slashes."""

    path: str
    bytes: int
    sha256: str


class SourceFile(_Node, frozen=True, kw_only=True):
    """A file the calbin was compiled from."""

    name: str
    bytes: int
    sha256: str


class SourceInfo(_Node, frozen=True, kw_only=True):
    """Where the model came from."""

    kind: Literal["gguf", "hf", "onnx_dir", "config"]
    name: str
    licence: str = ""
    files: tuple[SourceFile, ...] = ()
    origin: Literal["", "gguf", "hf", "config"] = ""  # of an onnx_dir: the kind of source its graphs were written from


class Chip(_Node, frozen=True, kw_only=True):
    """One chip of the target, with its parameter shard and what the artifact needs there, bytes."""

    id: int
    params: str  # path of the shard; "" in a weightless calbin
    params_bytes: int  # bytes of packed tensors in the shard, padding included
    activation_bytes: int  # largest activation arena over the submodels
    kv_bytes_per_block: int
    dram_bytes: int
    sram_bytes: int
    kv_heads: int = 0  # of the KV cache's heads, those on this chip; 0 = all


class TargetRef(_Node, frozen=True, kw_only=True):
    """The target the calbin was compiled for."""

    name: str
    chips: tuple[Chip, ...]


class IOTensor(_Node, frozen=True, kw_only=True):
    """One input or output of a submodel, semantic name."""

    name: str
    dtype: DType
    shape: tuple[int | str, ...]
    layout: Literal["row", "n16.v1", "kv64.v1"] = "row"
    tile: tuple[int, ...] = ()  # empty = none
    valid: tuple[int, int] = (0, 0)  # inclusive value range for integer tensors; (0, 0) = not bounded


class Workload(_Node, frozen=True, kw_only=True):
    """Work of a launch: value = constant + per_token * tokens + per_past_token * Σ (keys read) + per_expert * distinct experts."""

    unit: Literal["macs", "bytes"]
    constant: float
    per_token: float
    per_past_token: float
    per_expert: float = 0.0


class Submodel(_Node, frozen=True, kw_only=True):
    """One compiled graph, identified by (role, batch, q_len, context, kv); an encoder has no KV cache."""

    key: str  # unique, e.g. "decode.b4.q1.c2048.paged"
    role: Role
    batch: int
    q_len: int  # most tokens of a lane in a launch
    context: int
    kv: Literal["paged", "lane", "none"]
    program: str  # path
    rows: int  # most tokens of a launch over all lanes
    inputs: tuple[IOTensor, ...]
    outputs: tuple[IOTensor, ...]
    csrs: tuple[str, ...] = ("past_kv_cur_seq_len", "cur_seq_len")
    workload: tuple[Workload, ...]


class Constraints(_Node, frozen=True, kw_only=True):
    """What a scheduler may ask for, as data."""

    max_tokens_per_launch: int
    mixed_prefill_decode: bool  # may a launch hold both kinds of lanes
    late_inputs: bool
    kv: tuple[Literal["paged", "lane"], ...]


class KVSpec(_Node, frozen=True, kw_only=True):
    """The KV cache."""

    kind: Literal["paged", "lane"]
    dtype: KVDType
    layers: int
    heads: int
    head_dim: int
    block_positions: int  # positions of a block
    bytes_per_block: int  # over all chips and layers
    layout: Literal["kv64.v1"] = "kv64.v1"


class PackedTensor(_Node, frozen=True, kw_only=True):
    """A tensor of a parameter shard: `bytes` is its true size, the shard pads it to whole pages."""

    name: str
    chip: int
    bytes: int
    format: WeightFormat
    shape: tuple[int, ...]


class TensorQuant(_Node, frozen=True, kw_only=True):
    """How one source tensor was stored."""

    tensor: str
    source: str  # type in the source, e.g. "Q4_1", "BF16"
    format: WeightFormat
    group: int
    minimum: bool
    exact: bool  # imported bit for bit


class AdapterSlots(_Node, frozen=True, kw_only=True):
    """Reserved for LoRA: no slots yet."""

    slots: int = 0
    max_rank: int = 0


class Compatibility(_Node, frozen=True, kw_only=True):
    """Versions this calbin needs; compared at load, both sides named in a refusal."""

    format: str
    runtime: str
    compiler: str
    device: str = "any"
    driver: str = "any"
    firmware: str = "any"


class GoldenRef(_Node, frozen=True, kw_only=True):
    """Golden cases of a submodel. `tolerance` is of the largest |value| (f32), or a KL bound (quantised decoders)."""

    submodel: str
    path: str
    kind: Literal["max_abs", "kl"]
    tolerance: float
    bits: str  # sha256 of the scalar reference's logits for this numerics version


class Manifest(_Node, frozen=True, kw_only=True):
    """Everything a reader must know before it touches another file."""

    format_major: int = FORMAT_MAJOR
    format_minor: int = FORMAT_MINOR
    requires: tuple[str, ...] = ()  # features a reader must know
    producer: str
    version: str
    source: SourceInfo
    model: ModelSpec
    target: TargetRef
    submodels: tuple[Submodel, ...]
    constraints: Constraints
    kv: KVSpec
    tensors: tuple[PackedTensor, ...]
    quant: tuple[TensorQuant, ...]
    adapters: AdapterSlots = AdapterSlots()
    numerics: int = NUMERICS
    packed_layout: str = PACKED_LAYOUT
    compatibility: Compatibility
    goldens: tuple[GoldenRef, ...] = ()
    files: tuple[FileEntry, ...]

    @property
    def weightless(self) -> bool:
        """Whether it holds no parameters."""
        return WEIGHTLESS in self.requires
