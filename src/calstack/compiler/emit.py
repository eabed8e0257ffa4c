"""Writes programs, packed parameters and side files into staging, and drafts the manifest."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import calstack
from calstack.calbin.manifest import (
    FORMAT_MAJOR,
    FORMAT_MINOR,
    WEIGHTLESS,
    Chip,
    Compatibility,
    Constraints,
    KVSpec,
    Manifest,
    PackedTensor,
    TargetRef,
)
from calstack.calbin.shard import padded
from calstack.calbin.writer import CalbinWriter, encode_json
from calstack.compiler.partition import Piece, Shards, shares
from calstack.compiler.quantize.fill import fill, piece_bytes, piece_rows
from calstack.compiler.quantize.table import ParameterTable, VectorPlan, WeightPlan
from calstack.compiler.submodels import Draft
from calstack.progress import Progress
from calstack.specs import ModelSpec, WeightFormat
from calstack.targets.spec import TargetSpec

if TYPE_CHECKING:
    from calstack.graph.model import GraphBundle

__all__ = ["Emission", "chip_bytes", "emit"]


@dataclasses.dataclass(frozen=True, slots=True)
class Emission:
    """What is written."""

    bundle: GraphBundle
    spec: ModelSpec
    target: TargetSpec
    kv: KVSpec
    drafts: tuple[Draft, ...]
    table: ParameterTable
    shards: Shards

    @property
    def weightless(self) -> bool:
        """Whether the source has shapes only."""
        return self.bundle.source.kind == "config"


def emit(e: Emission, writer: CalbinWriter, progress: Progress) -> Manifest:
    """Write everything but the manifest, which is returned without goldens.

    Raises:
        SourceError: when a weight holds NaN or infinity, or cannot be read.
    """
    if not e.weightless:
        progress.stage("weights", sum(plan.bytes for plan in e.table.plans))
        _parameters(e, writer, progress)
    progress.stage("programs")
    for draft in e.drafts:
        writer.add_program(draft.submodel.program, draft.program)
    _side_files(e.bundle, writer)
    return _manifest(e, writer)


def _parameters(e: Emission, writer: CalbinWriter, progress: Progress) -> None:
    """Every planned tensor is made once and cut into the chips' pieces."""
    chips = range(e.shards.chips)
    with contextlib.ExitStack() as stack:
        sizes = [[(piece.tensor, piece_bytes(plan, piece.rows)) for plan, piece in _held(e, chip)] for chip in chips]
        files = [stack.enter_context(writer.shard(_shard(chip), sizes[chip])) for chip in chips]
        for plan in e.table.plans:
            wanted = [(chip, piece) for chip in chips for piece in _pieces(e, chip, plan)]
            for (chip, piece), data in zip(wanted, fill(plan, e.table, [piece.rows for _, piece in wanted]), strict=True):
                files[chip].add(piece.tensor, data)
            progress.advance(plan.bytes)


def _shard(chip: int) -> str:
    return f"params/chip{chip}.safetensors"


def _pieces(e: Emission, chip: int, plan: WeightPlan | VectorPlan) -> list[Piece]:
    return [piece for piece in e.shards.pieces(chip).values() if piece.source == plan.name]


def _held(e: Emission, chip: int) -> Iterator[tuple[WeightPlan | VectorPlan, Piece]]:
    """What a chip's shard holds, in its order."""
    for plan in e.table.plans:
        for piece in _pieces(e, chip, plan):
            yield plan, piece


def _side_files(bundle: GraphBundle, writer: CalbinWriter) -> None:
    if bundle.tokenizer_json:
        writer.add("tokenizer.json", bundle.tokenizer_json)
    if bundle.chat_template:
        writer.add("chat_template.jinja", bundle.chat_template.encode())
    writer.add("generation.json", encode_json(dict(bundle.generation)))


def _packed(plan: WeightPlan | VectorPlan, piece: Piece, chip: int) -> PackedTensor:
    n, nbytes = piece_rows(plan, piece.rows), piece_bytes(plan, piece.rows)
    if isinstance(plan, WeightPlan):
        return PackedTensor(name=piece.tensor, chip=chip, bytes=nbytes, format=plan.weight.format, shape=(n, plan.weight.k))
    return PackedTensor(name=piece.tensor, chip=chip, bytes=nbytes, format=WeightFormat.F32, shape=(n,))


def chip_bytes(table: ParameterTable, shards: Shards, drafts: Sequence[Draft], kv: KVSpec, chip: int) -> tuple[int, int, int]:
    """Bytes on a chip: parameters padded as in the shard, the largest activation arena, a KV block."""
    begin, end = shares(kv.heads, shards.chips)[chip]
    plans = {plan.name: plan for plan in table.plans}
    parameters = sum(padded(piece_bytes(plans[piece.source], piece.rows)) for piece in shards.pieces(chip).values())
    activations = max(draft.program.arena_bytes[chip] for draft in drafts)
    return parameters, activations, kv.bytes_per_block // kv.heads * (end - begin)


def _chip(e: Emission, chip: int) -> Chip:
    begin, end = shares(e.kv.heads, e.shards.chips)[chip]
    parameters, activations, block = chip_bytes(e.table, e.shards, e.drafts, e.kv, chip)
    longest = max(-(-draft.submodel.context // e.kv.block_positions) for draft in e.drafts)
    return Chip(
        id=chip,
        params="" if e.weightless else _shard(chip),
        params_bytes=parameters,
        activation_bytes=activations,
        kv_heads=end - begin,
        kv_bytes_per_block=block,
        dram_bytes=parameters + activations + longest * block,
        sram_bytes=e.target.chips[chip].sram_bytes,
    )


def _manifest(e: Emission, writer: CalbinWriter) -> Manifest:
    return Manifest(
        requires=(WEIGHTLESS,) if e.weightless else (),
        producer="calstack",
        version=calstack.__version__,
        source=e.bundle.source,
        model=e.spec,
        target=TargetRef(name=e.target.name, chips=tuple(_chip(e, chip) for chip in range(e.shards.chips))),
        submodels=tuple(draft.submodel for draft in e.drafts),
        constraints=Constraints(
            max_tokens_per_launch=max(draft.submodel.rows for draft in e.drafts),
            mixed_prefill_decode=e.target.mixed_prefill_decode,
            late_inputs=e.target.late_inputs,
            kv=("paged",) if e.kv.layers else (),
        ),
        kv=e.kv,
        tensors=tuple(_packed(plan, piece, chip) for chip in range(e.shards.chips) for plan, piece in _held(e, chip)),
        quant=e.table.quant(),
        compatibility=Compatibility(
            format=f"{FORMAT_MAJOR}.{FORMAT_MINOR}", runtime=f">={calstack.__version__}", compiler=calstack.__version__
        ),
        files=writer.files,
    )
