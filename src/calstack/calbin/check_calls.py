"""What must hold of a call: its buffers, weights and vectors are there and have the sizes it needs."""

from __future__ import annotations

from collections.abc import Iterator

from calstack.calbin.manifest import KVSpec
from calstack.calbin.packing import padded_rows, weight_bytes
from calstack.calbin.program import (
    AllGather,
    Attention,
    Buffer,
    Call,
    Classify,
    Embed,
    EncoderAttention,
    LayerNorm,
    Linear,
    LmHead,
    MoeCombine,
    MoeExperts,
    MoeRoute,
    NormAdd,
    NormLinear,
    Pool,
    Program,
    QkNormRopeKv,
    RopeTable,
    Vector,
    Weight,
)
from calstack.specs import WeightFormat

__all__ = ["MOST", "KnownParts", "out_of_range"]

MOST = {"batch": 4096, "rows": 1 << 20, "context": 1 << 24, "width": 1 << 24, "bytes": 1 << 44, "layers": 1 << 14, "group": 4096}

_GROUPED = (WeightFormat.W4A8, WeightFormat.W8A8, WeightFormat.W4A16)


def out_of_range(where: str, value: int, most: int, least: int = 1) -> Iterator[tuple[str, str]]:
    """(where, what) when `value` does not lie in `least`..`most`."""
    if not least <= value <= most:
        yield where, f"is {value}, must lie in {least}..{most}"


class KnownParts:
    """What the calls of one chip may refer to."""

    def __init__(self, *, buffers: dict[str, Buffer], tensors: dict[str, int], kv: KVSpec, program: Program) -> None:
        self._buffers, self._tensors, self._kv = buffers, tensors, kv
        self._rows, self._lanes, self._context = program.rows, program.lanes, program.context

    def faults(self, call: Call) -> Iterator[tuple[str, str]]:
        """(field, what) of everything wrong with a call."""
        if isinstance(call, Embed):
            yield from self._weight(call.weight)
            yield from self._buffer("out", call.out, call.weight.k)
            if call.index == "positions" and call.weight.n < self._context:
                yield "weight.n", f"is {call.weight.n} for {self._context} positions"
        elif isinstance(call, RopeTable):
            yield from self._vector("inv_freq", call.inv_freq, call.inv_freq.n)
            yield from self._buffer("out", call.out, 2 * call.inv_freq.n)
        elif isinstance(call, NormLinear):
            yield from self._norm_linear(call)
        elif isinstance(call, QkNormRopeKv | Attention):
            yield from self._heads(call)
        elif isinstance(call, Linear):
            yield from self._linear(call)
        elif isinstance(call, NormAdd):
            yield from self._vector("norm", call.norm, call.norm.n)
            yield from self._buffer("x", call.x, call.norm.n)
            yield from self._buffer("residual", call.residual, call.norm.n)
        elif isinstance(call, LayerNorm | EncoderAttention | Pool | Classify):
            yield from self._encoder(call)
        elif isinstance(call, AllGather):
            yield from self._all_gather(call)
        elif isinstance(call, MoeRoute | MoeExperts | MoeCombine):
            yield from self._moe(call)
        else:
            yield from self._lm_head(call)

    def _norm_linear(self, c: NormLinear) -> Iterator[tuple[str, str]]:
        yield from self._weight(c.weight)
        yield from self._vector("norm", c.norm, c.weight.k)
        yield from self._buffer("x", c.x, c.weight.k)
        if c.gated is not None and c.weight.n % 32:
            yield "weight.n", f"is {c.weight.n}: gated outputs come in pairs of 16"
        yield from self._buffer("out", c.out, c.weight.n // 2 if c.gated else c.weight.n)
        yield from self._bias(c.bias, c.weight)

    def _linear(self, c: Linear) -> Iterator[tuple[str, str]]:
        yield from self._weight(c.weight)
        yield from self._buffer("x", c.x, c.weight.k)
        if (c.residual is None) == (c.out is None):
            yield "out", "exactly one of residual and out must be set"
        elif c.residual is not None and c.activation is not None:
            yield "activation", "what is added to a residual is not activated"
        elif c.residual is not None:
            yield from self._buffer("residual", c.residual, c.weight.n)
        else:
            yield from self._buffer("out", c.out or "", c.weight.n)
        yield from self._bias(c.bias, c.weight)

    def _encoder(self, c: LayerNorm | EncoderAttention | Pool | Classify) -> Iterator[tuple[str, str]]:
        if isinstance(c, LayerNorm):
            yield from self._vector("norm", c.norm, c.norm.n)
            yield from self._vector("bias", c.bias, c.norm.n)
            yield from self._buffer("x", c.x, c.norm.n)
            yield from self._buffer("out", c.out, c.norm.n)
        elif isinstance(c, EncoderAttention):
            yield from self._encoder_attention(c)
        elif isinstance(c, Classify):
            yield from self._weight(c.weight)
            yield from self._weight(c.head, "head")
            yield from self._buffer("x", c.x, c.weight.k)
            yield from self._bias(c.bias, c.weight)
            yield from self._bias(c.head_bias, c.head, "head_bias")
            if c.head.k != c.weight.n:
                yield "head.k", f"is {c.head.k}, weight has {c.weight.n} outputs"
        elif (buffer := self._buffers.get(c.x)) is None:
            yield "x", f"buffer {c.x!r} does not exist on this chip"
        else:
            yield from self._buffer("x", c.x, buffer.width)

    def _encoder_attention(self, c: EncoderAttention) -> Iterator[tuple[str, str]]:
        for field in ("heads", "kv_heads", "head_dim"):
            yield from out_of_range(field, getattr(c, field), 1 << 16)
        if c.kv_heads < 1 or c.heads % c.kv_heads:
            yield "heads", f"{c.heads} query heads do not divide over {c.kv_heads} KV heads"
        yield from self._buffer("qkv", c.qkv, (c.heads + 2 * c.kv_heads) * c.head_dim)
        yield from self._buffer("out", c.out, c.heads * c.head_dim)
        yield from self._buffer("kv", c.kv, 2 * c.kv_heads * c.head_dim, padded_rows(self._rows, self._lanes))

    def _all_gather(self, c: AllGather) -> Iterator[tuple[str, str]]:
        for field, name in (("x", c.x), ("out", c.out)):
            if name is not None and (buffer := self._buffers.get(name)) is not None:
                yield from self._buffer(field, name, buffer.width)
            elif name is not None:
                yield field, f"buffer {name!r} does not exist on this chip"

    def _moe(self, c: MoeRoute | MoeExperts | MoeCombine) -> Iterator[tuple[str, str]]:
        yield from out_of_range("top_k", c.top_k, 64)
        if isinstance(c, MoeCombine):
            yield from self._buffer("choice", c.choice, 3 * c.top_k)
            width = self._buffers[c.residual].width if c.residual in self._buffers else 0
            yield from self._buffer("residual", c.residual, width)
            yield from self._buffer("x", c.x, c.top_k * width)
            return
        yield from self._weight(c.weight)
        yield from self._vector("norm", c.norm, c.weight.k)
        yield from self._buffer("x", c.x, c.weight.k)
        if isinstance(c, MoeRoute):
            yield from out_of_range("weight.n", c.weight.n, 1024, least=c.top_k)
            yield from self._buffer("out", c.out, 3 * c.top_k)
            return
        yield from self._weight(c.down, "down")
        yield from self._buffer("choice", c.choice, 3 * c.top_k)
        yield from self._buffer("out", c.out, c.top_k * c.weight.k)
        yield from out_of_range("experts", c.experts, 1024)
        if not 0 <= c.first <= c.all_experts - c.experts:
            yield "first", f"experts {c.first} to {c.first + c.experts} of {c.all_experts}"
        if (c.weight.n, c.down.n) != (2 * c.experts * c.down.k, c.experts * c.weight.k) or c.down.k % 16 or c.weight.k % 16:
            yield "weight.n", f"{c.weight.n} and {c.down.n} outputs do not fit {c.experts} experts of {c.down.k}"

    def _lm_head(self, c: LmHead) -> Iterator[tuple[str, str]]:
        yield from self._weight(c.weight)
        yield from self._vector("norm", c.norm, c.weight.k)
        yield from self._buffer("x", c.x, c.weight.k)
        yield from self._bias(c.bias, c.weight)

    def _heads(self, c: QkNormRopeKv | Attention) -> Iterator[tuple[str, str]]:
        if (c.kv_heads, c.head_dim) != (self._kv.heads, self._kv.head_dim):
            yield "kv_heads", f"{c.kv_heads} heads of {c.head_dim}, the KV cache has {self._kv.heads} of {self._kv.head_dim}"
        if c.heads < 1 or c.heads > MOST["width"] or c.heads % c.kv_heads:
            yield "heads", f"{c.heads} query heads do not divide over {c.kv_heads} KV heads"
        if not 0 <= c.kv_layer < self._kv.layers:
            yield "kv_layer", f"is {c.kv_layer}, the KV cache has {self._kv.layers} layers"
        yield from self._buffer("qkv", c.qkv, (c.heads + 2 * c.kv_heads) * c.head_dim)
        if isinstance(c, Attention):
            yield from self._buffer("out", c.out, c.heads * c.head_dim)
            if c.window < 0:
                yield "window", f"is {c.window}"
            return
        yield from self._buffer("table", c.table, c.rope_dim)
        if c.rope_dim % 2 or not 0 < c.rope_dim <= c.head_dim:
            yield "rope_dim", f"is {c.rope_dim} of a head of {c.head_dim}"
        for field, norm in (("q_norm", c.q_norm), ("k_norm", c.k_norm)):
            if norm is not None:
                yield from self._vector(field, norm, c.head_dim)

    def _buffer(self, field: str, name: str, width: int, rows: int = 0) -> Iterator[tuple[str, str]]:
        buffer, rows = self._buffers.get(name), rows or self._rows
        if buffer is None:
            yield field, f"buffer {name!r} does not exist on this chip"
        elif buffer.width != width or buffer.rows < rows or buffer.dtype != "f32":
            yield field, f"buffer {name!r} is {buffer.dtype} [{buffer.rows}, {buffer.width}], needs f32 [{rows}, {width}]"

    def _vector(self, field: str, v: Vector, n: int) -> Iterator[tuple[str, str]]:
        if v.n != n or n < 1:
            yield f"{field}.n", f"is {v.n}, must be {n}"
        if self._tensors.get(v.tensor) != 4 * v.n:
            yield f"{field}.tensor", f"{v.tensor!r} has {self._tensors.get(v.tensor)} bytes, needs {4 * v.n}"

    def _bias(self, bias: Vector | None, weight: Weight, at: str = "bias") -> Iterator[tuple[str, str]]:
        if bias is not None:
            yield from self._vector(at, bias, weight.n)

    def _weight(self, w: Weight, at: str = "weight") -> Iterator[tuple[str, str]]:
        grouped = w.format in _GROUPED
        for field in ("n", "k"):
            yield from out_of_range(f"{at}.{field}", getattr(w, field), MOST["width"])
        if grouped and (not 8 <= w.group <= MOST["group"] or w.group % 8 or w.k % w.group):
            yield f"{at}.group", f"is {w.group} for {w.k} inputs"
        elif not grouped and (w.group or w.minimum):
            yield f"{at}.group", f"must be 0 for {w.format}"
        elif w.format is WeightFormat.W8A8 and w.minimum:
            yield f"{at}.minimum", "w8a8 has no minimum"
        elif self._tensors.get(w.tensor) != weight_bytes(w):
            yield f"{at}.tensor", f"{w.tensor!r} has {self._tensors.get(w.tensor)} bytes, needs {weight_bytes(w)}"
