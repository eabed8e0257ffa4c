"""What must hold of a manifest and its programs before a device trusts their numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NoReturn

import msgspec

from calstack.calbin.check_calls import MOST, KnownParts, out_of_range
from calstack.calbin.manifest import NUMERICS, PACKED_LAYOUT, Manifest, Submodel
from calstack.calbin.packing import padded_rows
from calstack.calbin.program import (
    AllGather,
    Attention,
    Buffer,
    Classify,
    LmHead,
    MoeCombine,
    Pool,
    Program,
    QkNormRopeKv,
)
from calstack.errors import ArtifactError
from calstack.specs import MOST_EXTEND, Role

__all__ = ["ALIGN", "MOST", "check_manifest", "check_program"]

ALIGN = 64  # bytes, of activation buffers


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
        yield from out_of_range(f"$.target.chips[{index}].activation_bytes", chip.activation_bytes, MOST["bytes"], least=0)
        yield from out_of_range(f"$.target.chips[{index}].kv_heads", chip.kv_heads, 1 << 16, least=0)
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


def _submodel_faults(where: str, s: Submodel) -> Iterator[tuple[str, str]]:
    yield from out_of_range(f"{where}.batch", s.batch, MOST["batch"])
    yield from out_of_range(f"{where}.rows", s.rows, MOST["rows"])
    yield from out_of_range(f"{where}.q_len", s.q_len, MOST_EXTEND if s.role is Role.EXTEND else MOST["rows"])
    yield from out_of_range(f"{where}.context", s.context, MOST["context"])


def _kv_faults(m: Manifest) -> Iterator[tuple[str, str]]:
    kv = m.kv
    for field in ("heads", "head_dim", "block_positions"):
        yield from out_of_range(f"$.kv.{field}", getattr(kv, field), 1 << 16)
    yield from out_of_range("$.kv.layers", kv.layers, MOST["layers"], least=0)
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
        yield from out_of_range(f"$.arena_bytes[{chip.id}]", arena, chip.activation_bytes, least=0)
    yield from _duplicates("$.buffers", [b.name for b in p.buffers])
    for index, buffer in enumerate(p.buffers):
        yield from _buffer_faults(f"$.buffers[{index}]", buffer, p)
    for chip_id, stream in enumerate(p.streams):
        known = KnownParts(
            buffers={b.name: b for b in p.buffers if b.chip == chip_id},
            tensors={t.name: t.bytes for t in m.tensors if t.chip == chip_id},
            kv=msgspec.structs.replace(m.kv, heads=chips[chip_id].kv_heads or m.kv.heads),
            program=p,
        )
        for index, call in enumerate(stream):
            for field, what in known.faults(call):
                yield f"$.streams[{chip_id}][{index}].{field}", what
    yield from _gather_faults(p)
    yield from _encoder_faults(p) if s.role is Role.ENCODE else _head_faults(p, m.model.vocab)


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


def _encoder_faults(p: Program) -> Iterator[tuple[str, str]]:
    """An encoder gives something, and reads nothing that its launches do not have."""
    for chip, stream in enumerate(p.streams):
        if not any(isinstance(call, Pool | Classify) for call in stream):
            yield f"$.streams[{chip}]", "gives neither an embedding nor scores"
        if any(isinstance(call, LmHead | QkNormRopeKv | Attention) for call in stream):
            yield f"$.streams[{chip}]", "is an encoder's and has calls of a decoder"


def _buffer_faults(where: str, b: Buffer, p: Program) -> Iterator[tuple[str, str]]:
    yield from out_of_range(f"{where}.width", b.width, MOST["width"])
    yield from out_of_range(f"{where}.rows", b.rows, padded_rows(p.rows, p.lanes))
    yield from out_of_range(f"{where}.chip", b.chip, len(p.streams) - 1, least=0)
    if b.offset % ALIGN:
        yield f"{where}.offset", f"is {b.offset}, not a multiple of {ALIGN}"
    arena = p.arena_bytes[b.chip] if 0 <= b.chip < len(p.arena_bytes) else 0
    if b.offset < 0 or b.offset + b.bytes > arena:
        yield f"{where}.offset", f"{b.offset} + {b.bytes} bytes leave the arena of {arena}"
