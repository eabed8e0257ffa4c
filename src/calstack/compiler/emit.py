"""Writes programs, packed parameters and side files into staging, and drafts the manifest."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import calstack
from calstack.calbin.manifest import (
    FORMAT_MAJOR,
    FORMAT_MINOR,
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
from calstack.compiler.quantize.fill import fill
from calstack.compiler.quantize.table import ParameterTable, VectorPlan, WeightPlan
from calstack.compiler.submodels import Draft
from calstack.progress import Progress
from calstack.specs import ModelSpec, WeightFormat
from calstack.targets.spec import TargetSpec

if TYPE_CHECKING:
    from calstack.graph.model import GraphBundle

__all__ = ["Emission", "emit"]

_SHARD = "params/chip0.safetensors"


@dataclasses.dataclass(frozen=True, slots=True)
class Emission:
    """What is written."""

    bundle: GraphBundle
    spec: ModelSpec
    target: TargetSpec
    kv: KVSpec
    drafts: tuple[Draft, ...]
    table: ParameterTable


def emit(e: Emission, writer: CalbinWriter, progress: Progress) -> Manifest:
    """Write everything but the manifest, which is returned without goldens.

    Raises:
        SourceError: when a weight holds NaN or infinity, or cannot be read.
    """
    plans = e.table.plans
    progress.stage("weights", sum(plan.bytes for plan in plans))
    with writer.shard(_SHARD, [(_name(plan), plan.bytes) for plan in plans]) as shard:
        for plan in plans:
            shard.add(_name(plan), fill(plan, e.table))
            progress.advance(plan.bytes)
    progress.stage("programs")
    for draft in e.drafts:
        writer.add_program(draft.submodel.program, draft.program)
    _side_files(e.bundle, writer)
    return _manifest(e, writer)


def _name(plan: WeightPlan | VectorPlan) -> str:
    return plan.weight.tensor if isinstance(plan, WeightPlan) else plan.vector.tensor


def _side_files(bundle: GraphBundle, writer: CalbinWriter) -> None:
    writer.add("tokenizer.json", bundle.tokenizer_json)
    if bundle.chat_template:
        writer.add("chat_template.jinja", bundle.chat_template.encode())
    writer.add("generation.json", encode_json(dict(bundle.generation)))


def _packed(plan: WeightPlan | VectorPlan) -> PackedTensor:
    if isinstance(plan, WeightPlan):
        w = plan.weight
        return PackedTensor(name=w.tensor, chip=0, bytes=plan.bytes, format=w.format, shape=(w.n, w.k))
    return PackedTensor(name=plan.vector.tensor, chip=0, bytes=plan.bytes, format=WeightFormat.F32, shape=(plan.vector.n,))


def _chip(e: Emission) -> Chip:
    parameters = sum(padded(plan.bytes) for plan in e.table.plans)
    activations = max(draft.program.arena_bytes[0] for draft in e.drafts)
    longest = max(-(-draft.submodel.context // e.kv.block_positions) for draft in e.drafts)
    return Chip(
        id=0,
        params=_SHARD,
        params_bytes=parameters,
        activation_bytes=activations,
        kv_bytes_per_block=e.kv.bytes_per_block,
        dram_bytes=parameters + activations + longest * e.kv.bytes_per_block,
        sram_bytes=e.target.chips[0].sram_bytes,
    )


def _manifest(e: Emission, writer: CalbinWriter) -> Manifest:
    return Manifest(
        producer="calstack",
        version=calstack.__version__,
        source=e.bundle.source,
        model=e.spec,
        target=TargetRef(name=e.target.name, chips=(_chip(e),)),
        submodels=tuple(draft.submodel for draft in e.drafts),
        constraints=Constraints(
            max_tokens_per_launch=max(draft.submodel.rows for draft in e.drafts),
            mixed_prefill_decode=e.target.mixed_prefill_decode,
            late_inputs=e.target.late_inputs,
            kv=("paged",),
        ),
        kv=e.kv,
        tensors=tuple(_packed(plan) for plan in e.table.plans),
        quant=e.table.quant(),
        compatibility=Compatibility(
            format=f"{FORMAT_MAJOR}.{FORMAT_MINOR}", runtime=f">={calstack.__version__}", compiler=calstack.__version__
        ),
        files=writer.files,
    )
