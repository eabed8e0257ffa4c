"""Frozen values that both sides speak. No behaviour beyond validation and arithmetic on the values themselves."""

from __future__ import annotations

import enum
import math
from typing import Literal

import msgspec

from calstack.errors import RequestError

__all__ = [
    "MOST_EXTEND",
    "Activation",
    "DType",
    "DrawKey",
    "EncoderSpec",
    "KVDType",
    "LogitBias",
    "MoESpec",
    "ModelSpec",
    "NormKind",
    "QuantSpec",
    "Role",
    "RopeSpec",
    "SamplingParams",
    "TensorSpec",
    "WeightFormat",
    "parse_quant",
]


MOST_EXTEND = 8  # tokens of a lane in a launch of an extend submodel


class DType(enum.StrEnum):
    """Element types of tensors that cross a seam."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    I8 = "i8"
    U8 = "u8"
    I32 = "i32"
    I64 = "i64"

    @property
    def bytes(self) -> int:
        """Size of one element in bytes."""
        return {"f32": 4, "f16": 2, "bf16": 2, "i8": 1, "u8": 1, "i32": 4, "i64": 8}[self.value]


class KVDType(enum.StrEnum):
    """Element type of the KV cache; int8 planes hold a f32 scale per position and head beside the codes."""

    F32 = "f32"
    BF16 = "bf16"
    BF16_V8 = "bf16_v8"  # K bf16, V int8
    I8 = "i8"

    @property
    def plane_bytes(self) -> tuple[int, int]:
        """Bytes of an element of K and of V."""
        return {"f32": (4, 4), "bf16": (2, 2), "bf16_v8": (2, 1), "i8": (1, 1)}[self.value]

    def position_bytes(self, head_dim: int) -> int:
        """Bytes of K and V of one position and head, scales included."""
        return sum(size * head_dim + (4 if size == 1 else 0) for size in self.plane_bytes)


class Role(enum.StrEnum):
    """What a submodel is for."""

    PREFILL = "prefill"
    DECODE = "decode"
    EXTEND = "extend"
    ENCODE = "encode"
    VISION = "vision"


class WeightFormat(enum.StrEnum):
    """How a packed weight is stored and multiplied (docs/concepts/numerics.md)."""

    W4A8 = "w4a8"  # unsigned 4-bit codes, f16 scale (and f16 minimum) per group; int8 activations per row and group
    W8A8 = "w8a8"  # signed 8-bit codes, f16 scale per group; int8 activations per row and group
    W4A16 = "w4a16"  # as w4a8's storage, f32 activations
    BF16 = "bf16"
    F16 = "f16"
    F32 = "f32"


class Activation(enum.StrEnum):
    """Activation of the gated MLP."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    GELU = "gelu"


class NormKind(enum.StrEnum):
    """Normalisation; `rms_plus_one` multiplies by (1 + weight) as Gemma does."""

    RMS = "rms"
    RMS_PLUS_ONE = "rms_plus_one"
    LAYER = "layer"


class _Frozen(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class TensorSpec(_Frozen, frozen=True, kw_only=True):
    """Name, element type and shape of a tensor; a string in `shape` is a symbolic dimension."""

    name: str
    dtype: DType
    shape: tuple[int | str, ...]


class RopeSpec(_Frozen, frozen=True, kw_only=True):
    """Rotary embedding: rotates the first `dim` of each head, halves layout (i, i + dim/2)."""

    theta: float = 10000.0
    dim: int
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0
    attention_factor: float = 1.0


class MoESpec(_Frozen, frozen=True, kw_only=True):
    """Mixture of experts: router softmax, top-k, optional renormalisation, gated experts."""

    experts: int
    top_k: int
    intermediate: int
    renormalise: bool = True


class EncoderSpec(_Frozen, frozen=True, kw_only=True):
    """What a bidirectional encoder has beyond a decoder's fields: learned positions (`rope` is unused), segments, and its heads."""

    types: int  # segments (token types)
    positions: int  # rows of the position table; `context` may be less
    labels: tuple[str, ...] = ()  # classes of the sequence classifier; empty = there is none
    pooling: Literal["none", "mean", "cls"] = "none"  # how a text's embedding is made of its tokens' states
    normalise: bool = False  # embeddings have length 1


class ModelSpec(_Frozen, frozen=True, kw_only=True):
    """A normalised decoder. Graph construction is driven by this value alone; no code path names a model."""

    arch: str  # the HF model_type, e.g. "llama"
    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int  # most positions the model was made for
    rope: RopeSpec
    norm: NormKind = NormKind.RMS
    norm_eps: float = 1e-5
    activation: Activation = Activation.SILU
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    tied_embeddings: bool = False
    embed_scale: float = 1.0
    sliding_window: int = 0  # 0 = none; keys with q_pos - k_pos < sliding_window are seen
    full_attention_every: int = 0  # 0 = every layer is alike; n = every nth layer is full, the others slide
    local_rope: RopeSpec | None = None  # rope of the sliding layers where it differs
    attn_softcap: float = 0.0
    logit_softcap: float = 0.0
    attn_scale: float = 0.0  # 0 = head_dim ** -0.5
    post_norms: bool = False  # Gemma: norms after attention and MLP too
    moe: MoESpec | None = None
    encoder: EncoderSpec | None = None  # set: no KV, no causal mask, one `encode` graph
    bos_ids: tuple[int, ...] = ()
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    add_bos: bool = False

    @property
    def scale(self) -> float:
        """What query-key products are multiplied by."""
        return self.attn_scale or self.head_dim**-0.5

    def slides(self, layer: int) -> bool:
        """Whether attention of `layer` (from 0) is limited to the sliding window."""
        every = self.full_attention_every
        return self.sliding_window > 0 and not (every and (layer + 1) % every == 0)


class QuantSpec(_Frozen, frozen=True, kw_only=True):
    """How the compiler stores linear weights; tensors already stored so in the source are imported bit for bit.

    `default` of None means: keep what the source has (GGUF), else w8a8 (HF).
    """

    default: WeightFormat | None = None
    group: int = 32
    minimum: bool = True  # w4: store a minimum beside the scale
    head: WeightFormat | None = None  # lm_head and embedding; None = as default, but never below 8 bit
    overrides: tuple[tuple[str, WeightFormat], ...] = ()  # (glob over tensor names, format), first match wins


def parse_quant(text: str) -> QuantSpec:
    """`w4a8` or `w8a8,group=64,min=off,head=f16,GLOB=FORMAT,…` as a QuantSpec; ValueError with the part that is not understood."""
    first, *rest = text.split(",")
    default = None if first in ("", "source") else WeightFormat(first)
    group, minimum, head = 32, True, None
    overrides: list[tuple[str, WeightFormat]] = []
    for part in rest:
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"{part!r} is not KEY=VALUE")
        if key == "group":
            group = int(value)
        elif key == "min":
            minimum = {"on": True, "off": False}[value]
        elif key == "head":
            head = WeightFormat(value)
        else:
            overrides.append((key, WeightFormat(value)))
    return QuantSpec(default=default, group=group, minimum=minimum, head=head, overrides=tuple(overrides))


class LogitBias(_Frozen, frozen=True, kw_only=True):
    """Added to one token's logit before penalties; -inf forbids it."""

    token: int
    bias: float


class DrawKey(_Frozen, frozen=True, kw_only=True):
    """Keys the counted random draw of one output token: the same key always draws the same number."""

    seed: int  # unsigned 64 bit
    choice: int = 0
    index: int = 0  # output index, from 0


class SamplingParams(_Frozen, frozen=True, kw_only=True):
    """Sampling of one request; order: bias, penalties, mask, temperature, top-k, top-p, min-p, draw.

    temperature 0 is greedy (lowest id wins a tie). top_k 0, top_p 1 and min_p 0 switch the filter off.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[LogitBias, ...] = ()

    @property
    def greedy(self) -> bool:
        """True when no draw is needed. Temperatures too small for 1/t in f32 are greedy too."""
        return self.temperature < 1e-6

    @property
    def needs_history(self) -> bool:
        """True when the sampler must know the request's earlier tokens."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    def check(self, vocab: int) -> None:
        """Raise RequestError naming the first field out of range."""
        rules = (
            ("temperature", 0.0 <= self.temperature <= 1e9),
            ("top_k", self.top_k >= 0),
            ("top_p", 0.0 < self.top_p <= 1.0),
            ("min_p", 0.0 <= self.min_p <= 1.0),
            ("repetition_penalty", 0.0 < self.repetition_penalty <= 1e3),
            ("frequency_penalty", -1e3 <= self.frequency_penalty <= 1e3),
            ("presence_penalty", -1e3 <= self.presence_penalty <= 1e3),
            ("logit_bias", all(0 <= b.token < vocab and not math.isnan(b.bias) for b in self.logit_bias)),
        )
        for name, good in rules:
            if not good:
                raise RequestError(f"{name} is out of range", where=f"$.{name}", param=name)
