"""Calls over chips: outputs are split, never sums, so that every number is computed whole on one chip and has the bits of one chip.

A projection's output columns, attention's KV heads with their query heads, and the vocabulary of the head are split; what the next
call needs whole is gathered. Norms, rope tables and the residual stream are computed on every chip; the embedding is on chip 0.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping

import msgspec

from calstack.calbin.packing import LANES
from calstack.calbin.program import (
    AllGather,
    Attention,
    Call,
    Embed,
    Linear,
    LmHead,
    MoeCombine,
    MoeExperts,
    MoeRoute,
    NormAdd,
    NormLinear,
    QkNormRopeKv,
    RopeTable,
    Vector,
    Weight,
)
from calstack.compiler.lower import Lowered
from calstack.errors import UnsupportedError

__all__ = ["Piece", "Shards", "Stream", "partition", "shares"]

Ranges = tuple[tuple[int, int], ...]


def shares(n: int, chips: int, unit: int = 1) -> tuple[tuple[int, int], ...]:
    """[begin, end) of each chip's share of `n`, in whole units; the first chips get what does not divide."""
    units = -(-n // unit)
    ends = [min(n, unit * -(-units * (chip + 1) // chips)) for chip in range(chips)]
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A tensor of a chip's shard: rows of a planned tensor, in the order of the packed rows; no ranges = all of it."""

    tensor: str
    source: str
    rows: Ranges = ()


class Shards:
    """What each chip holds of the planned tensors; grows while programs are partitioned, each piece once."""

    def __init__(self, chips: int) -> None:
        self.chips = chips
        self._pieces: list[dict[str, Piece]] = [{} for _ in range(chips)]

    def pieces(self, chip: int) -> Mapping[str, Piece]:
        """Pieces of a chip by name."""
        return self._pieces[chip]

    def weight(self, chip: int, weight: Weight, rows: Ranges = ()) -> Weight:
        """The chip's part of a weight."""
        n = sum(end - begin for begin, end in rows) if rows else weight.n
        return Weight(
            tensor=self._hold(chip, weight.tensor, rows, weight.n),
            format=weight.format,
            n=n,
            k=weight.k,
            group=weight.group,
            minimum=weight.minimum,
        )

    def vector(self, chip: int, vector: Vector | None, rows: Ranges = ()) -> Vector | None:
        """The chip's part of a vector."""
        return None if vector is None else self.whole(chip, vector, rows)

    def whole(self, chip: int, vector: Vector, rows: Ranges = ()) -> Vector:
        """The same for a vector that is there."""
        n = sum(end - begin for begin, end in rows) if rows else vector.n
        return Vector(tensor=self._hold(chip, vector.tensor, rows, vector.n), n=n)

    def hold_all(self, calls: Iterable[Call]) -> None:
        """Chip 0 holds every tensor of these calls."""
        for call in calls:
            for value in (getattr(call, field) for field in call.__struct_fields__):
                if isinstance(value, Weight | Vector):
                    self._hold(0, value.tensor, (), value.n)

    def _hold(self, chip: int, source: str, rows: Ranges, n: int) -> str:
        rows = () if rows == ((0, n),) else rows
        name = source + (f"[{','.join(f'{begin}:{end}' for begin, end in rows)}]" if rows else "")
        self._pieces[chip].setdefault(name, Piece(name, source, rows))
        return name


@dataclasses.dataclass(frozen=True, slots=True)
class Stream:
    """A chip's calls, and its buffers' widths in f32 per row."""

    calls: tuple[Call, ...]
    widths: Mapping[str, int]


def partition(lowered: Lowered, shards: Shards) -> tuple[Stream, ...]:
    """One stream of calls per chip; tensors they name are noted in `shards`.

    Raises:
        UnsupportedError: for fewer KV heads than chips, or for a call that has no split.
    """
    if shards.chips == 1:
        shards.hold_all(lowered.calls)
        return (Stream(lowered.calls, lowered.widths),)
    if lowered.kv.heads < shards.chips:
        what = f"{lowered.kv.heads} KV heads cannot be split over {shards.chips} chips"
        raise UnsupportedError(what, where="partition", remedy="choose a target of one chip")
    split = _Split(lowered, shards)
    for call in lowered.calls:
        split.call(call)
    return split.streams()


class _Split:
    def __init__(self, lowered: Lowered, shards: Shards) -> None:
        self._shards, self._chips = shards, range(shards.chips)
        self._calls: list[list[Call]] = [[] for _ in self._chips]
        self._widths: list[dict[str, int]] = [{} for _ in self._chips]
        self._whole = lowered.widths
        self._ropes = {call.qkv: call for call in lowered.calls if isinstance(call, QkNormRopeKv)}
        self._syncs = 0
        self._starts: tuple[int, ...] = (0,)  # first expert of each chip, of the last experts' call

    def streams(self) -> tuple[Stream, ...]:
        return tuple(Stream(tuple(calls), widths) for calls, widths in zip(self._calls, self._widths, strict=True))

    @functools.singledispatchmethod
    def call(self, call: Call) -> None:
        """Add the call to every chip's stream."""
        raise UnsupportedError(f"{type(call).OP} is not split over chips", where="partition", remedy="choose a target of one chip")

    @call.register
    def _(self, c: Embed) -> None:
        part = self._name("embed", 0, c.weight.k)
        weight = self._shards.weight(0, c.weight)
        self._calls[0].append(Embed(layer=c.layer, weight=weight, scale=c.scale, out=part))
        self._gather(c.layer, [part, *[None] * (len(self._chips) - 1)], c.out)

    @call.register
    def _(self, c: RopeTable) -> None:
        for chip in self._chips:
            out = self._same(c.out, chip)
            inv_freq = self._shards.whole(chip, c.inv_freq)
            self._calls[chip].append(RopeTable(layer=c.layer, inv_freq=inv_freq, attention_factor=c.attention_factor, out=out))

    @call.register
    def _(self, c: NormLinear) -> None:
        rope = self._ropes.get(c.out)
        parts: list[str | None] = []
        for chip in self._chips:
            rows, width = self._columns(c, rope, chip)
            out = self._same(c.out, chip, width) if rope else self._name(f"{c.out}.part", chip, width)
            self._calls[chip].append(self._norm_linear(c, chip, rows, out))
            parts.append(out)
        if rope is None:
            self._gather(c.layer, parts, c.out)

    def _columns(self, c: NormLinear, rope: QkNormRopeKv | None, chip: int) -> tuple[Ranges, int]:
        """Weight rows of the chip, and the width of what comes out."""
        if rope is not None:
            rows = self._head_rows(rope, chip)
            return rows, sum(end - begin for begin, end in rows)
        if c.gated is not None:  # rows are pairs of 16 gate and 16 up outputs
            begin, end = shares(c.weight.n, self._shards.chips, 2 * LANES)[chip]
            return ((begin, end),), (end - begin) // 2
        begin, end = shares(c.weight.n, self._shards.chips, LANES)[chip]
        return ((begin, end),), end - begin

    def _norm_linear(self, c: NormLinear, chip: int, rows: Ranges, out: str) -> NormLinear:
        return NormLinear(
            layer=c.layer,
            x=self._at(c.x, chip),
            norm=self._shards.whole(chip, c.norm),
            norm_kind=c.norm_kind,
            eps=c.eps,
            weight=self._shards.weight(chip, c.weight, rows),
            bias=self._shards.vector(chip, c.bias, rows),
            gated=c.gated,
            out=out,
        )

    def _heads(self, kv_heads: int, heads: int, chip: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """KV heads and query heads of a chip."""
        begin, end = shares(kv_heads, self._shards.chips)[chip]
        group = heads // kv_heads
        return (begin, end), (begin * group, end * group)

    def _head_rows(self, c: QkNormRopeKv, chip: int) -> Ranges:
        kv, q = self._heads(c.kv_heads, c.heads, chip)
        k0, v0 = c.heads, c.heads + c.kv_heads
        return tuple((c.head_dim * (first + begin), c.head_dim * (first + end)) for first, (begin, end) in ((0, q), (k0, kv), (v0, kv)))

    @call.register
    def _(self, c: QkNormRopeKv) -> None:
        for chip in self._chips:
            kv, q = self._heads(c.kv_heads, c.heads, chip)
            self._calls[chip].append(
                QkNormRopeKv(
                    layer=c.layer,
                    qkv=self._at(c.qkv, chip),
                    table=self._at(c.table, chip),
                    kv_layer=c.kv_layer,
                    heads=q[1] - q[0],
                    kv_heads=kv[1] - kv[0],
                    head_dim=c.head_dim,
                    rope_dim=c.rope_dim,
                    q_norm=self._shards.vector(chip, c.q_norm),
                    k_norm=self._shards.vector(chip, c.k_norm),
                    norm_kind=c.norm_kind,
                    eps=c.eps,
                )
            )

    @call.register
    def _(self, c: Attention) -> None:
        parts: list[str | None] = []
        for chip in self._chips:
            kv, q = self._heads(c.kv_heads, c.heads, chip)
            parts.append(self._name(f"{c.out}.part", chip, (q[1] - q[0]) * c.head_dim))
            self._calls[chip].append(
                Attention(
                    layer=c.layer,
                    qkv=self._at(c.qkv, chip),
                    kv_layer=c.kv_layer,
                    heads=q[1] - q[0],
                    kv_heads=kv[1] - kv[0],
                    head_dim=c.head_dim,
                    scale=c.scale,
                    window=c.window,
                    softcap=c.softcap,
                    out=str(parts[-1]),
                )
            )
        self._gather(c.layer, parts, c.out)

    @call.register
    def _(self, c: Linear) -> None:
        parts: list[str | None] = []
        for chip, share in enumerate(shares(c.weight.n, self._shards.chips, LANES)):
            parts.append(self._name(f"{c.residual or c.out}.part.{self._syncs}", chip, share[1] - share[0]))
            weight, bias = self._shards.weight(chip, c.weight, (share,)), self._shards.vector(chip, c.bias, (share,))
            self._calls[chip].append(Linear(layer=c.layer, x=self._at(c.x, chip), weight=weight, bias=bias, out=parts[-1]))
        self._gather(c.layer, parts, str(c.residual or c.out), add=c.residual is not None)

    @call.register
    def _(self, c: NormAdd) -> None:
        for chip in self._chips:
            own = {"x": self._at(c.x, chip), "residual": self._at(c.residual, chip), "norm": self._shards.whole(chip, c.norm)}
            self._calls[chip].append(msgspec.structs.replace(c, **own))

    def _experts(self, experts: int) -> tuple[tuple[int, int], ...]:
        if experts < self._shards.chips:
            what = f"{experts} experts cannot be split over {self._shards.chips} chips"
            raise UnsupportedError(what, where="partition", remedy="choose a target of one chip")
        return shares(experts, self._shards.chips)

    @call.register
    def _(self, c: MoeRoute) -> None:
        starts = tuple(begin for begin, _ in self._experts(c.weight.n))
        for chip in self._chips:
            self._calls[chip].append(
                msgspec.structs.replace(
                    c,
                    x=self._at(c.x, chip),
                    norm=self._shards.whole(chip, c.norm),
                    weight=self._shards.weight(chip, c.weight),
                    starts=starts,
                    out=self._same(c.out, chip),
                )
            )

    @call.register
    def _(self, c: MoeExperts) -> None:
        for chip, (begin, end) in enumerate(self._experts(c.experts)):
            up, down = c.weight.n // c.experts, c.down.n // c.experts
            self._calls[chip].append(
                msgspec.structs.replace(
                    c,
                    x=self._at(c.x, chip),
                    norm=self._shards.whole(chip, c.norm),
                    weight=self._shards.weight(chip, c.weight, ((begin * up, end * up),)),
                    down=self._shards.weight(chip, c.down, ((begin * down, end * down),)),
                    choice=self._at(c.choice, chip),
                    first=begin,
                    experts=end - begin,
                    out=self._same(c.out, chip),
                )
            )
        self._starts = tuple(begin for begin, _ in self._experts(c.experts))

    @call.register
    def _(self, c: MoeCombine) -> None:
        for chip in self._chips:
            self._calls[chip].append(
                msgspec.structs.replace(
                    c,
                    sync=f"s{self._syncs}",
                    x=self._at(c.x, chip),
                    choice=self._at(c.choice, chip),
                    residual=self._at(c.residual, chip),
                    starts=self._starts,
                )
            )
        self._syncs += 1

    @call.register
    def _(self, c: LmHead) -> None:
        for chip, (begin, end) in enumerate(shares(c.weight.n, self._shards.chips, LANES)):
            self._calls[chip].append(
                LmHead(
                    layer=c.layer,
                    x=self._at(c.x, chip),
                    norm=self._shards.whole(chip, c.norm),
                    norm_kind=c.norm_kind,
                    eps=c.eps,
                    weight=self._shards.weight(chip, c.weight, ((begin, end),)),
                    bias=self._shards.vector(chip, c.bias, ((begin, end),)),
                    softcap=c.softcap,
                    first=begin,
                )
            )

    def _gather(self, layer: int, parts: Iterable[str | None], out: str, *, add: bool = False) -> None:
        sync = f"s{self._syncs}"
        self._syncs += 1
        for chip, part in enumerate(parts):
            target = self._at(out, chip) if add else self._same(out, chip)
            self._calls[chip].append(AllGather(layer=layer, sync=sync, x=part, out=target, add=add))

    def _at(self, buffer: str, chip: int) -> str:
        """The chip's buffer of that name: names are unique over all chips."""
        return f"{buffer}@{chip}"

    def _same(self, buffer: str, chip: int, width: int = 0) -> str:
        return self._name(buffer, chip, width or self._whole[buffer])

    def _name(self, buffer: str, chip: int, width: int) -> str:
        name = self._at(buffer, chip)
        self._widths[chip][name] = width
        return name
