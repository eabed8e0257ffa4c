"""What must hold of a manifest and its programs before a device trusts their numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NoReturn

import msgspec

from calstack.calbin.manifest import NUMERICS, PACKED_LAYOUT, KVSpec, Manifest, Submodel
from calstack.calbin.packing import weight_bytes
from calstack.calbin.program import (
    AllGather,
    Attention,
    Buffer,
    Call,
    Embed,
    Linear,
    LmHead,
    MoeCombine,
    MoeExperts,
    MoeRoute,
    NormAdd,
    NormLinear,
    Program,
    QkNormRopeKv,
    RopeTable,
    Vector,
    Weight,
)
from calstack.errors import ArtifactError
from calstack.specs import WeightFormat

__all__ = ["ALIGN", "MOST", "check_manifest", "check_program"]

ALIGN = 64  # bytes, of activation buffers
MOST = {"batch": 4096, "rows": 1 << 20, "context": 1 << 24, "width": 1 << 24, "bytes": 1 << 44, "layers": 1 << 14, "group": 4096}

_GROUPED = (WeightFormat.W4A8, WeightFormat.W8A8, WeightFormat.W4A16)


def _refuse(where: str, what: str, remedy: str = "compile the model again or fetch the calbin anew") -> NoReturn:
    raise ArtifactError(what, where=where, remedy=remedy)


def check_manifest(manifest: Manifest, name: str) -> None:
    """Bounds, unique keys and references inside the manifest.

    Raises:
        ArtifactError: naming the field path.
    """
    if manifest.numerics != NUMERICS:
        _refuse(
            f"{name} $.numerics", f"numerics version {manifest.numerics} is not computed here, {NUMERICS} is", "compile the model again"
        )
    if manifest.packed_layout != PACKED_LAYOUT:
        _refuse(f"{name} $.packed_layout", f"layout {manifest.packed_layout!r} is not read here, {PACKED_LAYOUT} is", "compile again")
    for where, what in _manifest_faults(manifest):
        _refuse(f"{name} {where}", what)


def _manifest_faults(m: Manifest) -> Iterator[tuple[str, str]]:
    if not m.submodels:
        yield "$.submodels", "is empty"
    if [c.id for c in m.target.chips] != list(range(len(m.target.chips))) or not m.target.chips:
        yield "$.target.chips", "must be numbered 0, 1, … and never be empty"
    files = [f.path for f in m.files]
    yield from _duplicates("$.files", files)
    yield from _duplicates("$.submodels", [s.key for s in m.submodels])
    yield from _duplicates("$.submodels", [(s.role, s.batch, s.q_len, s.context, s.kv) for s in m.submodels])
    yield from _duplicates("$.tensors", [(t.chip, t.name) for t in m.tensors])
    for where, path in _references(m):
        if path not in files:
            yield where, f"{path!r} is not in $.files"
    for index, submodel in enumerate(m.submodels):
        yield from _submodel_faults(f"$.submodels[{index}]", submodel)
    yield from _kv_faults(m)
    for index, chip in enumerate(m.target.chips):
        yield from _range(f"$.target.chips[{index}].activation_bytes", chip.activation_bytes, MOST["bytes"], least=0)
        yield from _range(f"$.target.chips[{index}].kv_heads", chip.kv_heads, 1 << 16, least=0)
    together = sum(chip.kv_heads or m.kv.heads for chip in m.target.chips)
    if together != m.kv.heads:
        yield "$.target.chips", f"have {together} KV heads together, $.kv.heads is {m.kv.heads}"
    if not 0 < m.model.vocab <= MOST["width"]:
        yield "$.model.vocab", f"is {m.model.vocab}"


def _duplicates(where: str, keys: Sequence[object]) -> Iterator[tuple[str, str]]:
    seen: set[object] = set()
    for index, key in enumerate(keys):
        if key in seen:
            yield f"{where}[{index}]", f"repeats {key}"
        seen.add(key)


def _references(m: Manifest) -> Iterator[tuple[str, str]]:
    for index, submodel in enumerate(m.submodels):
        yield f"$.submodels[{index}].program", submodel.program
    for index, chip in enumerate(m.target.chips):
        if not m.weightless:
            yield f"$.target.chips[{index}].params", chip.params
    for index, golden in enumerate(m.goldens):
        yield f"$.goldens[{index}].path", golden.path


def _range(where: str, value: int, most: int, least: int = 1) -> Iterator[tuple[str, str]]:
    if not least <= value <= most:
        yield where, f"is {value}, must lie in {least}..{most}"


def _submodel_faults(where: str, s: Submodel) -> Iterator[tuple[str, str]]:
    yield from _range(f"{where}.batch", s.batch, MOST["batch"])
    yield from _range(f"{where}.rows", s.rows, MOST["rows"])
    yield from _range(f"{where}.q_len", s.q_len, MOST["rows"])
    yield from _range(f"{where}.context", s.context, MOST["context"])


def _kv_faults(m: Manifest) -> Iterator[tuple[str, str]]:
    kv = m.kv
    for field in ("heads", "head_dim", "block_positions"):
        yield from _range(f"$.kv.{field}", getattr(kv, field), 1 << 16)
    yield from _range("$.kv.layers", kv.layers, MOST["layers"], least=0)
    if kv.head_dim % 2:
        yield "$.kv.head_dim", f"is {kv.head_dim}, must be even"
    want = kv.layers * kv.heads * kv.block_positions * kv.dtype.position_bytes(kv.head_dim)
    if kv.bytes_per_block != want:
        yield "$.kv.bytes_per_block", f"is {kv.bytes_per_block}, the fields beside it give {want}"


def check_program(program: Program, submodel: Submodel, manifest: Manifest, name: str) -> None:
    """Every buffer, weight and width of a program fits its arena, the shards and the KV cache.

    Raises:
        ArtifactError: naming the program file and the field path.
    """
    if program.version != 1:
        _refuse(f"{name} $.version", f"program version {program.version} is not read here, 1 is", "use a newer calstack")
    for where, what in _program_faults(program, submodel, manifest):
        _refuse(f"{name} {where}", what)


def _program_faults(p: Program, s: Submodel, m: Manifest) -> Iterator[tuple[str, str]]:
    for field, have, want in (("submodel", p.submodel, s.key), ("rows", p.rows, s.rows), ("lanes", p.lanes, s.batch)):
        if have != want:
            yield f"$.{field}", f"is {have}, the manifest says {want}"
    if p.context != s.context:
        yield "$.context", f"is {p.context}, the manifest says {s.context}"
    chips = m.target.chips
    if len(p.streams) != len(chips) or len(p.arena_bytes) != len(chips):
        yield "$.streams", f"has {len(p.streams)} streams and {len(p.arena_bytes)} arenas for {len(chips)} chips"
        return
    for chip, arena in zip(chips, p.arena_bytes, strict=True):
        yield from _range(f"$.arena_bytes[{chip.id}]", arena, chip.activation_bytes, least=0)
    yield from _duplicates("$.buffers", [b.name for b in p.buffers])
    for index, buffer in enumerate(p.buffers):
        yield from _buffer_faults(f"$.buffers[{index}]", buffer, p)
    for chip_id, stream in enumerate(p.streams):
        known = _Known(
            buffers={b.name: b for b in p.buffers if b.chip == chip_id},
            tensors={t.name: t.bytes for t in m.tensors if t.chip == chip_id},
            kv=msgspec.structs.replace(m.kv, heads=chips[chip_id].kv_heads or m.kv.heads),
            rows=p.rows,
        )
        for index, call in enumerate(stream):
            for field, what in known.faults(call):
                yield f"$.streams[{chip_id}][{index}].{field}", what
    yield from _gather_faults(p)
    yield from _head_faults(p, m.model.vocab)


def _gather_faults(p: Program) -> Iterator[tuple[str, str]]:
    """All chips meet at the same sync points in the same order, and the parts of a gather fill its output."""
    width = {b.name: b.width for b in p.buffers}
    syncs = [[call for call in stream if isinstance(call, AllGather | MoeCombine)] for stream in p.streams]
    for chip, own in enumerate(syncs):
        if [(c.sync, type(c)) for c in own] != [(c.sync, type(c)) for c in syncs[0]]:
            yield f"$.streams[{chip}]", "has other sync points than chip 0"
            return
        yield from _duplicates(f"$.streams[{chip}]", [c.sync for c in own if c.sync])
    for together in zip(*([call for call in own if isinstance(call, AllGather)] for own in syncs), strict=True):
        if len({call.add for call in together}) > 1:
            yield "$.streams", f"gather {together[0].sync} is added on some chips only"
        parts = sum(width.get(c.x, 0) for c in together if c.x is not None)
        for chip, call in enumerate(together):
            if width.get(call.out) != parts:
                yield f"$.streams[{chip}]", f"gather {call.sync} has {parts} columns for {call.out!r} of {width.get(call.out)}"


def _head_faults(p: Program, vocab: int) -> Iterator[tuple[str, str]]:
    """The chips' heads cover the vocabulary one after the other, and are the last call."""
    at = 0
    for chip, stream in enumerate(p.streams):
        heads = [call for call in stream if isinstance(call, LmHead)]
        if len(heads) != 1 or stream[-1] is not heads[0]:
            yield f"$.streams[{chip}]", "must end in its one lm_head"
            return
        if heads[0].first != at:
            yield f"$.streams[{chip}]", f"lm_head begins at {heads[0].first}, the chip before ended at {at}"
        at += heads[0].weight.n
    if at != vocab:
        yield "$.streams", f"the heads have {at} outputs, the vocabulary {vocab} entries"


def _buffer_faults(where: str, b: Buffer, p: Program) -> Iterator[tuple[str, str]]:
    yield from _range(f"{where}.width", b.width, MOST["width"])
    yield from _range(f"{where}.rows", b.rows, p.rows)
    yield from _range(f"{where}.chip", b.chip, len(p.streams) - 1, least=0)
    if b.offset % ALIGN:
        yield f"{where}.offset", f"is {b.offset}, not a multiple of {ALIGN}"
    arena = p.arena_bytes[b.chip] if 0 <= b.chip < len(p.arena_bytes) else 0
    if b.offset < 0 or b.offset + b.bytes > arena:
        yield f"{where}.offset", f"{b.offset} + {b.bytes} bytes leave the arena of {arena}"


class _Known:
    """What the calls of one chip may refer to."""

    def __init__(self, *, buffers: dict[str, Buffer], tensors: dict[str, int], kv: KVSpec, rows: int) -> None:
        self._buffers, self._tensors, self._kv, self._rows = buffers, tensors, kv, rows

    def faults(self, call: Call) -> Iterator[tuple[str, str]]:
        """(field, what) of everything wrong with a call."""
        if isinstance(call, Embed):
            yield from self._weight(call.weight)
            yield from self._buffer("out", call.out, call.weight.k)
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
        elif c.residual is not None:
            yield from self._buffer("residual", c.residual, c.weight.n)
        else:
            yield from self._buffer("out", c.out or "", c.weight.n)
        yield from self._bias(c.bias, c.weight)

    def _all_gather(self, c: AllGather) -> Iterator[tuple[str, str]]:
        for field, name in (("x", c.x), ("out", c.out)):
            if name is not None and (buffer := self._buffers.get(name)) is not None:
                yield from self._buffer(field, name, buffer.width)
            elif name is not None:
                yield field, f"buffer {name!r} does not exist on this chip"

    def _moe(self, c: MoeRoute | MoeExperts | MoeCombine) -> Iterator[tuple[str, str]]:
        yield from _range("top_k", c.top_k, 64)
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
            yield from _range("weight.n", c.weight.n, 1024, least=c.top_k)
            yield from self._buffer("out", c.out, 3 * c.top_k)
            return
        yield from self._weight(c.down, "down")
        yield from self._buffer("choice", c.choice, 3 * c.top_k)
        yield from self._buffer("out", c.out, c.top_k * c.weight.k)
        yield from _range("experts", c.experts, 1024)
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

    def _buffer(self, field: str, name: str, width: int) -> Iterator[tuple[str, str]]:
        buffer = self._buffers.get(name)
        if buffer is None:
            yield field, f"buffer {name!r} does not exist on this chip"
        elif buffer.width != width or buffer.rows < self._rows or buffer.dtype != "f32":
            yield field, f"buffer {name!r} is {buffer.dtype} [{buffer.rows}, {buffer.width}], needs f32 [{self._rows}, {width}]"

    def _vector(self, field: str, v: Vector, n: int) -> Iterator[tuple[str, str]]:
        if v.n != n or n < 1:
            yield f"{field}.n", f"is {v.n}, must be {n}"
        if self._tensors.get(v.tensor) != 4 * v.n:
            yield f"{field}.tensor", f"{v.tensor!r} has {self._tensors.get(v.tensor)} bytes, needs {4 * v.n}"

    def _bias(self, bias: Vector | None, weight: Weight) -> Iterator[tuple[str, str]]:
        if bias is not None:
            yield from self._vector("bias", bias, weight.n)

    def _weight(self, w: Weight, at: str = "weight") -> Iterator[tuple[str, str]]:
        grouped = w.format in _GROUPED
        for field in ("n", "k"):
            yield from _range(f"{at}.{field}", getattr(w, field), MOST["width"])
        if grouped and (not 8 <= w.group <= MOST["group"] or w.group % 8 or w.k % w.group):
            yield f"{at}.group", f"is {w.group} for {w.k} inputs"
        elif not grouped and (w.group or w.minimum):
            yield f"{at}.group", f"must be 0 for {w.format}"
        elif w.format is WeightFormat.W8A8 and w.minimum:
            yield f"{at}.minimum", "w8a8 has no minimum"
        elif self._tensors.get(w.tensor) != weight_bytes(w):
            yield f"{at}.tensor", f"{w.tensor!r} has {self._tensors.get(w.tensor)} bytes, needs {weight_bytes(w)}"
