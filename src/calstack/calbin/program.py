"""The program: a submodel's command stream, as readable data.

A program is a list of fused calls per chip over planned buffers. Rows are the tokens of a launch, ragged over lanes: lane 0's
`cur_len` rows first, then lane 1's, …; every activation buffer is `[rows, width]`. Numerics of each call: docs/concepts/numerics.md.
The cpu device, the cost model and the memory plan walk these same objects.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from calstack.specs import Activation, DType, NormKind, WeightFormat

__all__ = [
    "AllGather",
    "Attention",
    "Buffer",
    "Call",
    "Classify",
    "Embed",
    "EncoderAttention",
    "LayerNorm",
    "Linear",
    "LmHead",
    "MoeCombine",
    "MoeExperts",
    "MoeRoute",
    "NormAdd",
    "NormLinear",
    "Pool",
    "Program",
    "QkNormRopeKv",
    "RopeTable",
    "Vector",
    "Weight",
]


class _Node(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Buffer(_Node, frozen=True, kw_only=True):
    """A planned region of chip memory; buffers whose lifetimes do not meet may share bytes."""

    name: str
    dtype: DType
    width: int  # elements per row
    rows: int  # most rows a launch uses
    chip: int = 0
    space: Literal["dram", "sram"] = "dram"
    offset: int  # bytes from the start of the chip's activation arena, multiple of 64

    @property
    def bytes(self) -> int:
        """Bytes of the region, before alignment."""
        return self.width * self.rows * self.dtype.bytes


class Weight(_Node, frozen=True, kw_only=True):
    """A packed linear weight `[n, k]` in the packed layout of the manifest (`n16.v1`)."""

    tensor: str  # name in the chip's parameter shard
    format: WeightFormat
    n: int  # outputs
    k: int  # inputs
    group: int = 0  # 0 for formats without groups
    minimum: bool = False


class Vector(_Node, frozen=True, kw_only=True):
    """A raw f32 parameter vector (norm weights, biases, inv_freq)."""

    tensor: str
    n: int


class _Call(_Node, frozen=True, kw_only=True):
    layer: int = -1  # for reports; -1 = not part of a layer


class Embed(_Call, frozen=True, kw_only=True, tag_field="op", tag="embed"):
    """`out[r] = row index[r] of weight, dequantised, times scale`; with `add` it is added to `out` instead.

    `index` says what is looked up: token ids, segments (`types`) or positions.
    """

    weight: Weight
    scale: float = 1.0
    index: Literal["ids", "types", "positions"] = "ids"
    add: bool = False
    out: str
    OP: ClassVar[str] = "embed"


class RopeTable(_Call, frozen=True, kw_only=True, tag_field="op", tag="rope_table"):
    """`out[r] = cos(angle_0..), sin(angle_0..)` for the row's position: width = rotated dim (cos half, then sin half)."""

    inv_freq: Vector
    attention_factor: float = 1.0
    out: str
    OP: ClassVar[str] = "rope_table"


class NormLinear(_Call, frozen=True, kw_only=True, tag_field="op", tag="norm_linear"):
    """`out = epilogue(linear(norm(x)))`; activations are quantised once per row and group between norm and product.

    With `gated`, weight rows come as alternating blocks of 16 gate and 16 up outputs and `out` has n / 2 columns:
    `act(gate) * up`. `n / 2` must then be a multiple of 16.
    """

    x: str
    norm: Vector
    norm_kind: NormKind = NormKind.RMS
    eps: float
    weight: Weight
    bias: Vector | None = None
    gated: Activation | None = None
    out: str
    OP: ClassVar[str] = "norm_linear"


class QkNormRopeKv(_Call, frozen=True, kw_only=True, tag_field="op", tag="qk_norm_rope_kv"):
    """In `qkv` (`[q heads | k heads | v heads] * head_dim` per row): optional per-head q/k norm, rope of q (in place) and k,
    then K and V are rounded and written to the KV cache of `kv_layer` at the row's position."""

    qkv: str
    table: str
    kv_layer: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_dim: int
    q_norm: Vector | None = None
    k_norm: Vector | None = None
    norm_kind: NormKind = NormKind.RMS
    eps: float = 0.0
    OP: ClassVar[str] = "qk_norm_rope_kv"


class Attention(_Call, frozen=True, kw_only=True, tag_field="op", tag="attention"):
    """Causal attention of each row's q heads over its lane's KV cache; `out` is `[rows, heads * head_dim]`."""

    qkv: str
    kv_layer: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    softcap: float = 0.0
    out: str
    OP: ClassVar[str] = "attention"


class Linear(_Call, frozen=True, kw_only=True, tag_field="op", tag="linear"):
    """`y = linear(x) (+ bias)`; with `residual` (a buffer) `residual += y` in place, else `out = y`, or `activation(y)`.

    Exactly one of `residual` and `out` is set.
    """

    x: str
    weight: Weight
    bias: Vector | None = None
    residual: str | None = None
    activation: Activation | None = None
    out: str | None = None
    OP: ClassVar[str] = "linear"


class NormAdd(_Call, frozen=True, kw_only=True, tag_field="op", tag="norm_add"):
    """`residual += norm(x)`; `x` holds anything afterwards."""

    x: str
    norm: Vector
    norm_kind: NormKind = NormKind.RMS
    eps: float
    residual: str
    OP: ClassVar[str] = "norm_add"


class LmHead(_Call, frozen=True, kw_only=True, tag_field="op", tag="lm_head"):
    """Final norm and projection of the rows a launch asks for, then sampling, top-k or logits per row.

    Over several chips each computes `weight.n` vocabulary entries from `first` on; chip 0 gathers them and samples.
    """

    x: str
    norm: Vector
    norm_kind: NormKind = NormKind.RMS
    eps: float
    weight: Weight
    bias: Vector | None = None
    softcap: float = 0.0
    first: int = 0
    OP: ClassVar[str] = "lm_head"


class AllGather(_Call, frozen=True, kw_only=True, tag_field="op", tag="all_gather"):
    """`out` = the chips' `x` side by side, in the order of chips; with `add` it is added to `out` instead.

    A sync point: every chip's stream has the call with the same `sync`, no chip passes it before all have reached it, and `x` may
    change again behind it. A chip that brings nothing has no `x`.
    """

    sync: str
    x: str | None = None
    out: str
    add: bool = False
    OP: ClassVar[str] = "all_gather"


class MoeRoute(_Call, frozen=True, kw_only=True, tag_field="op", tag="moe_route"):
    """The experts of each row: `out` is `[rows, 3 * top_k]`, per choice its weight, its expert, and the pair's place among the pairs of
    the chip that holds the expert, sorted by expert. `starts` is the first expert of every chip."""

    x: str
    norm: Vector
    norm_kind: NormKind = NormKind.RMS
    eps: float
    weight: Weight
    top_k: int
    renormalise: bool
    starts: tuple[int, ...] = (0,)
    out: str
    OP: ClassVar[str] = "moe_route"


class MoeExperts(_Call, frozen=True, kw_only=True, tag_field="op", tag="moe_experts"):
    """Outputs of the chip's experts `[first, first + experts)` of `all_experts` for the pairs that chose them, each at its place in `out`
    (`[rows, top_k * k]`, read as `[rows * top_k, k]`).

    `weight` stacks the experts' gate and up projections, each as in `NormLinear` with `gated`; `down` their down projections.
    """

    x: str
    norm: Vector
    norm_kind: NormKind = NormKind.RMS
    eps: float
    weight: Weight
    down: Weight
    activation: Activation = Activation.SILU
    choice: str
    top_k: int
    first: int = 0
    experts: int
    all_experts: int
    out: str
    OP: ClassVar[str] = "moe_experts"


class MoeCombine(_Call, frozen=True, kw_only=True, tag_field="op", tag="moe_combine"):
    """`residual += Σ weight * output` over a row's choices in their order; outputs are read where their experts are.

    Over several chips a sync point, like `AllGather`.
    """

    sync: str = ""
    x: str
    choice: str
    residual: str
    top_k: int
    starts: tuple[int, ...] = (0,)
    OP: ClassVar[str] = "moe_combine"


class LayerNorm(_Call, frozen=True, kw_only=True, tag_field="op", tag="layer_norm"):
    """`out = (x - mean) / deviation * norm + bias`; `out` may be `x`."""

    x: str
    norm: Vector
    bias: Vector
    eps: float
    out: str
    OP: ClassVar[str] = "layer_norm"


class EncoderAttention(_Call, frozen=True, kw_only=True, tag_field="op", tag="encoder_attention"):
    """Attention of each row over all rows of its lane; `qkv` as in `QkNormRopeKv`.

    Keys and values go to `kv`, f32 in the layout of KV blocks, where every lane begins a block of its own:
    `[64 * (rows // 64 + lanes), 2 * kv_heads * head_dim]`.
    """

    qkv: str
    kv: str
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    out: str
    OP: ClassVar[str] = "encoder_attention"


class Pool(_Call, frozen=True, kw_only=True, tag_field="op", tag="pool"):
    """A lane's embedding: the mean of its rows of `x`, or the first of them; `normalise` gives it length 1."""

    x: str
    how: Literal["mean", "cls"]
    normalise: bool = False
    OP: ClassVar[str] = "pool"


class Classify(_Call, frozen=True, kw_only=True, tag_field="op", tag="classify"):
    """A lane's scores: `linear(head, tanh(linear(weight, first row of x)))`."""

    x: str
    weight: Weight
    bias: Vector | None = None
    head: Weight
    head_bias: Vector | None = None
    OP: ClassVar[str] = "classify"


Call = (
    Embed
    | RopeTable
    | NormLinear
    | QkNormRopeKv
    | Attention
    | Linear
    | NormAdd
    | LmHead
    | AllGather
    | MoeRoute
    | MoeExperts
    | MoeCombine
    | LayerNorm
    | EncoderAttention
    | Pool
    | Classify
)


class Program(_Node, frozen=True, kw_only=True):
    """Command streams of one submodel: `streams[chip]` is that chip's calls in order."""

    version: int = 1
    submodel: str  # key of the submodel in the manifest
    rows: int  # most rows (tokens over all lanes) in a launch
    lanes: int  # most lanes in a launch
    context: int  # most positions of a lane
    buffers: tuple[Buffer, ...]
    arena_bytes: tuple[int, ...]  # activation arena per chip
    streams: tuple[tuple[Call, ...], ...]
