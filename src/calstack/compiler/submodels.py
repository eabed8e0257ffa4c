"""Which submodels a calbin gets, and each one's program."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from calstack.calbin.manifest import IOTensor, KVSpec, Submodel
from calstack.calbin.program import Classify, Embed, Pool, Program
from calstack.compiler.lower import Lowered
from calstack.compiler.memory_plan import plan_buffers
from calstack.compiler.options import CompileOptions
from calstack.compiler.partition import Shards, partition
from calstack.compiler.workload import workloads
from calstack.specs import DType, Role

__all__ = ["Draft", "draft_submodels"]


@dataclasses.dataclass(frozen=True, slots=True)
class Draft:
    """A submodel and its program, ready to be written."""

    submodel: Submodel
    program: Program


@dataclasses.dataclass(frozen=True, slots=True)
class _Size:
    role: Role
    batch: int
    q_len: int
    rows: int
    context: int

    @property
    def graph(self) -> Role:
        """The role whose graph it is made from: an extend is a decode of more tokens."""
        return Role.DECODE if self.role is Role.EXTEND else self.role

    @property
    def key(self) -> str:
        return f"{self.role}.b{self.batch}.q{self.q_len}.c{self.context}.{self.kv}"

    @property
    def kv(self) -> Literal["paged", "none"]:
        return "none" if self.role is Role.ENCODE else "paged"


def draft_submodels(
    lowered: Mapping[Role, Lowered], kv: KVSpec, options: CompileOptions, context: int, shards: Shards
) -> tuple[Draft, ...]:
    """One prefill that takes chunks of as many lanes as the largest batch, and per batch a decode and an extend; of an encoder
    one submodel that takes whole texts. Their tensors are noted in `shards`."""
    rows = min(options.prefill_rows, context)
    most, batches = max(options.batches), sorted(options.batches)
    sizes = [_Size(Role.PREFILL, most, rows, rows, context)]
    sizes += [_Size(Role.DECODE, batch, 1, batch, context) for batch in batches]
    if options.extend:
        sizes += [_Size(Role.EXTEND, batch, options.extend, min(batch * options.extend, rows), context) for batch in batches]
    sizes.append(_Size(Role.ENCODE, most, context, max(options.prefill_rows, context), context))
    return tuple(_draft(size, lowered[size.graph], kv, shards) for size in sizes if size.graph in lowered)


def _draft(size: _Size, lowered: Lowered, kv: KVSpec, shards: Shards) -> Draft:
    streams = partition(lowered, shards)
    planned = [plan_buffers(stream.calls, stream.widths, size.rows, chip=chip, lanes=size.batch) for chip, stream in enumerate(streams)]
    program = Program(
        submodel=size.key,
        rows=size.rows,
        lanes=size.batch,
        context=size.context,
        buffers=tuple(buffer for buffers, _ in planned for buffer in buffers),
        arena_bytes=tuple(arena for _, arena in planned),
        streams=tuple(stream.calls for stream in streams),
    )
    submodel = Submodel(
        key=size.key,
        role=size.role,
        batch=size.batch,
        q_len=size.q_len,
        context=size.context,
        kv=size.kv,
        program=f"programs/{size.key}.json",
        rows=size.rows,
        inputs=_inputs(size, lowered, kv),
        outputs=_outputs(size, lowered),
        csrs=("cur_seq_len",) if size.role is Role.ENCODE else ("past_kv_cur_seq_len", "cur_seq_len"),
        workload=workloads(lowered.calls, kv, head_rows=1 if size.role is Role.PREFILL else None),
    )
    return Draft(submodel, program)


def _vocab(lowered: Lowered) -> int:
    return next(call.weight.n for call in lowered.calls if isinstance(call, Embed) and call.index == "ids")


def _encoder_inputs(size: _Size, lowered: Lowered) -> tuple[IOTensor, ...]:
    types = next((call.weight.n for call in lowered.calls if isinstance(call, Embed) and call.index == "types"), 1)
    return (
        IOTensor(name="input_ids", dtype=DType.I32, shape=("rows",), valid=(0, _vocab(lowered) - 1)),
        IOTensor(name="token_type_ids", dtype=DType.I32, shape=("rows",), valid=(0, types - 1)),
        IOTensor(name="cur_seq_len", dtype=DType.I32, shape=(size.batch,), valid=(0, size.q_len)),
    )


def _encoder_outputs(size: _Size, lowered: Lowered) -> tuple[IOTensor, ...]:
    widths = {"embedding": [lowered.widths[call.x] for call in lowered.calls if isinstance(call, Pool)]}
    widths["scores"] = [call.head.n for call in lowered.calls if isinstance(call, Classify)]
    return tuple(IOTensor(name=name, dtype=DType.F32, shape=(size.batch, width[0])) for name, width in widths.items() if width)


def _inputs(size: _Size, lowered: Lowered, kv: KVSpec) -> tuple[IOTensor, ...]:
    if size.role is Role.ENCODE:
        return _encoder_inputs(size, lowered)
    blocks = -(-size.context // kv.block_positions)
    last = size.context - 1
    return (
        IOTensor(name="input_ids", dtype=DType.I32, shape=("rows",), valid=(0, _vocab(lowered) - 1)),
        IOTensor(name="positions", dtype=DType.I32, shape=("rows",), valid=(0, last)),
        IOTensor(name="block_tables", dtype=DType.I32, shape=(size.batch, blocks)),
        IOTensor(name="past_kv_cur_seq_len", dtype=DType.I32, shape=(size.batch,), valid=(0, last)),
        IOTensor(name="cur_seq_len", dtype=DType.I32, shape=(size.batch,), valid=(0, size.q_len)),
    )


def _outputs(size: _Size, lowered: Lowered) -> tuple[IOTensor, ...]:
    if size.role is Role.ENCODE:
        return _encoder_outputs(size, lowered)
    vocab = _vocab(lowered)
    return (
        IOTensor(name="token", dtype=DType.I32, shape=(size.batch,), valid=(0, vocab - 1)),
        IOTensor(name="logits", dtype=DType.F32, shape=("logit_rows", vocab)),
    )
