"""Translates a calbin's programs for the native executor: names become offsets, tensors become file ranges."""

from __future__ import annotations

import functools

from calstack.calbin.program import (
    AllGather,
    Attention,
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
from calstack.calbin.reader import Calbin
from calstack.errors import ArtifactError, UnsupportedError
from calstack.native import CalbinBuilder
from calstack.specs import NormKind

__all__ = ["build_calbin"]

_Range = tuple[int, int, int]
_WeightArg = tuple[int, int, str, int, int, int, bool]


def build_calbin(calbin: Calbin, kv_blocks: int) -> CalbinBuilder:
    """A builder holding every submodel's program, in the order of the manifest, chip by chip.

    Raises:
        ArtifactError: when a size does not fit.
    """
    manifest, kv = calbin.manifest, calbin.manifest.kv
    first, *others = manifest.target.chips
    try:
        builder = CalbinBuilder(
            str(calbin.path / first.params), manifest.model.vocab, kv.dtype, kv.layers, first.kv_heads or kv.heads, kv.head_dim, kv_blocks
        )
        _programs(builder, calbin, first.id)
        for chip in others:
            builder.chip(str(calbin.path / chip.params), chip.kv_heads)
            _programs(builder, calbin, chip.id)
    except (ValueError, MemoryError, RuntimeError) as error:
        raise ArtifactError(
            str(error) or "memory cannot be reserved", where=str(calbin.path), remedy="compile the model again, or use fewer KV blocks"
        ) from error
    return builder


def _programs(builder: CalbinBuilder, calbin: Calbin, chip: int) -> None:
    for submodel in calbin.manifest.submodels:
        _Translator(builder, calbin, calbin.program(submodel.key), chip).run()


class _Translator:
    def __init__(self, builder: CalbinBuilder, calbin: Calbin, program: Program, chip: int) -> None:
        self._to, self._program, self._chip = builder, program, chip
        self._shard = calbin.shard(chip)
        self._buffers = {b.name: (b.offset, b.width) for b in program.buffers}
        self._parts: dict[str, list[tuple[int, int]]] = {}  # of each gather, by chip
        for call in (call for stream in program.streams for call in stream if isinstance(call, AllGather | MoeCombine) and call.sync):
            self._parts.setdefault(call.sync, []).append((0, 0) if call.x is None else self._buffers[call.x])

    def run(self) -> None:
        p = self._program
        self._to.program(p.rows, p.lanes, p.context, p.arena_bytes[self._chip])
        for call in p.streams[self._chip]:
            self.call(call)

    @functools.singledispatchmethod
    def call(self, call: Call) -> None:
        """Add one call to the builder's last program."""
        raise UnsupportedError(
            f"call {type(call).__name__} is not known to the cpu device", where=self._program.submodel, remedy="use a newer calstack"
        )

    @call.register
    def _(self, c: Embed) -> None:
        self._to.embed(c.layer, self._weight(c.weight), c.scale, self._buffers[c.out], c.index, c.add)

    @call.register
    def _(self, c: RopeTable) -> None:
        self._to.rope_table(c.layer, self._need(c.inv_freq), c.attention_factor, self._buffers[c.out])

    @call.register
    def _(self, c: NormLinear) -> None:
        self._norm(c.norm_kind)
        self._to.norm_linear(
            c.layer,
            self._buffers[c.x],
            self._need(c.norm),
            c.eps,
            self._weight(c.weight),
            self._vector(c.bias),
            c.gated,
            self._buffers[c.out],
        )

    @call.register
    def _(self, c: Linear) -> None:
        target = c.residual or c.out
        if target is None:
            raise ArtifactError("a linear call has no output", where=self._program.submodel, remedy="compile the model again")
        weight = self._weight(c.weight)
        bias, x = self._vector(c.bias), self._buffers[c.x]
        self._to.linear(c.layer, x, weight, bias, c.residual is not None, c.activation, self._buffers[target])

    @call.register
    def _(self, c: QkNormRopeKv) -> None:
        self._norm(c.norm_kind)
        heads, table = (c.heads, c.kv_heads, c.head_dim), self._buffers[c.table]
        norms = self._vector(c.q_norm), self._vector(c.k_norm)
        self._to.qk_norm_rope_kv(c.layer, self._buffers[c.qkv], table, c.kv_layer, heads, c.rope_dim, *norms, c.eps)

    @call.register
    def _(self, c: Attention) -> None:
        heads = (c.heads, c.kv_heads, c.head_dim)
        self._to.attention(c.layer, self._buffers[c.qkv], c.kv_layer, heads, c.scale, c.window, c.softcap, self._buffers[c.out])

    @call.register
    def _(self, c: LmHead) -> None:
        self._norm(c.norm_kind)
        weight, bias = self._weight(c.weight), self._vector(c.bias)
        self._to.lm_head(c.layer, self._buffers[c.x], self._need(c.norm), c.eps, weight, bias, c.softcap, c.first)

    @call.register
    def _(self, c: AllGather) -> None:
        self._to.all_gather(c.layer, self._parts[c.sync], self._buffers[c.out], c.add)

    @call.register
    def _(self, c: NormAdd) -> None:
        self._norm(c.norm_kind)
        self._to.norm_add(c.layer, self._buffers[c.x], self._need(c.norm), c.eps, self._buffers[c.residual])

    @call.register
    def _(self, c: LayerNorm) -> None:
        norm, bias = self._need(c.norm), self._need(c.bias)
        self._to.layer_norm(c.layer, self._buffers[c.x], norm, bias, c.eps, self._buffers[c.out])

    @call.register
    def _(self, c: EncoderAttention) -> None:
        rows = next(b.rows for b in self._program.buffers if b.name == c.kv)
        heads = (c.heads, c.kv_heads, c.head_dim)
        self._to.encoder_attention(c.layer, self._buffers[c.qkv], self._buffers[c.kv], rows, heads, c.scale, self._buffers[c.out])

    @call.register
    def _(self, c: Pool) -> None:
        self._to.pool(c.layer, self._buffers[c.x], c.how, c.normalise)

    @call.register
    def _(self, c: Classify) -> None:
        head = self._weight(c.head), self._vector(c.head_bias)
        self._to.classify(c.layer, self._buffers[c.x], self._weight(c.weight), self._vector(c.bias), *head)

    @call.register
    def _(self, c: MoeRoute) -> None:
        self._norm(c.norm_kind)
        x, out, weight = self._buffers[c.x], self._buffers[c.out], self._weight(c.weight)
        self._to.moe_route(c.layer, x, self._need(c.norm), c.eps, weight, c.top_k, c.renormalise, c.starts, out)

    @call.register
    def _(self, c: MoeExperts) -> None:
        self._norm(c.norm_kind)
        self._to.moe_experts(
            c.layer,
            self._buffers[c.x],
            self._need(c.norm),
            c.eps,
            self._weight(c.weight),
            self._weight(c.down),
            c.activation.value,
            self._buffers[c.choice],
            c.top_k,
            c.first,
            c.experts,
            c.all_experts,
            self._buffers[c.out],
        )

    @call.register
    def _(self, c: MoeCombine) -> None:
        parts = self._parts[c.sync] if c.sync else [self._buffers[c.x]]
        self._to.moe_combine(c.layer, parts, self._buffers[c.choice], c.top_k, c.starts, self._buffers[c.residual])

    def _norm(self, kind: NormKind) -> None:
        if kind is NormKind.LAYER:
            raise UnsupportedError("layer norm is not known to the cpu device", where=self._program.submodel, remedy="use a newer calstack")

    def _range(self, tensor: str) -> tuple[int, int]:
        start, nbytes = self._shard.range(tensor)
        return start, nbytes

    def _weight(self, w: Weight) -> _WeightArg:
        return (*self._range(w.tensor), w.format.value, w.n, w.k, w.group, w.minimum)

    def _need(self, v: Vector) -> _Range:
        return (*self._range(v.tensor), v.n)

    def _vector(self, v: Vector | None) -> _Range | None:
        return None if v is None else self._need(v)
