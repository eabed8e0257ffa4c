"""The whole compilation in order. `FUSION` is the one list of graph passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from calstack.calbin.manifest import KVSpec
from calstack.calbin.packing import BLOCK_POSITIONS
from calstack.compiler.emit import Emission, emit
from calstack.compiler.fuse.attention import ATTENTION
from calstack.compiler.fuse.embed import EMBED, EMBED_ADD, EMBED_SCALE
from calstack.compiler.fuse.encoder import (
    ACTIVATED,
    CLASSIFY,
    ENCODER_ATTENTION,
    LAYER_NORM,
    POOL_CLS,
    POOL_MEAN,
    POOL_NORMALISED,
)
from calstack.compiler.fuse.linear import BIAS, LINEAR, RESIDUAL
from calstack.compiler.fuse.mlp import GATED
from calstack.compiler.fuse.moe import MOE, MOE_RESIDUAL
from calstack.compiler.fuse.norm import LM_HEAD, NORM_RESIDUAL, NORM_STACK
from calstack.compiler.fuse.rope import ROPE_TABLE
from calstack.compiler.fuse.rule import Fuse, Miss, RemoveDead
from calstack.compiler.inventory import Row, check_fused, take_inventory
from calstack.compiler.lower import Lowered, lower
from calstack.compiler.options import CompileOptions
from calstack.compiler.partition import Shards
from calstack.compiler.passes import GraphPass, run_passes
from calstack.compiler.quantize.table import ParameterTable
from calstack.compiler.submodels import Draft, draft_submodels
from calstack.errors import UnsupportedError
from calstack.progress import Progress, Silent
from calstack.specs import KVDType
from calstack.targets.spec import TargetSpec, load_target

if TYPE_CHECKING:
    import onnx_ir as ir

    from calstack.calbin.manifest import Manifest
    from calstack.calbin.writer import CalbinWriter
    from calstack.graph.model import GraphBundle

__all__ = ["FUSION", "PassTrace", "Plan", "compile_into", "fuse_graph", "plan_bundle", "trace_passes"]

FUSION = (
    EMBED,
    EMBED_SCALE,
    EMBED_ADD,
    ROPE_TABLE,
    LINEAR,
    BIAS,
    ATTENTION,
    ENCODER_ATTENTION,
    LAYER_NORM,
    GATED,
    ACTIVATED,
    MOE,
    NORM_STACK,
    POOL_NORMALISED,
    POOL_MEAN,
    POOL_CLS,
    CLASSIFY,
    LM_HEAD,
    RESIDUAL,
    NORM_RESIDUAL,
    MOE_RESIDUAL,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """Everything decided before weights are read: cheap to make, and where an unsupported model ends."""

    inventory: tuple[Row, ...]
    drafts: tuple[Draft, ...]
    table: ParameterTable
    shards: Shards
    kv: KVSpec
    target: TargetSpec


def fuse_graph(model: ir.Model) -> ir.Graph:
    """A fused copy of a canonical graph.

    Raises:
        UnsupportedError: naming operators that fit no call, with the reasons.
    """
    graph = model.clone().graph
    fusions = [Fuse(rule) for rule in FUSION]
    passes: list[GraphPass] = [step for fusion in fusions for step in (fusion, RemoveDead())]
    run_passes(graph, passes)
    misses: list[Miss] = [miss for fusion in fusions for miss in fusion.misses]
    check_fused(graph, misses)
    return graph


@dataclasses.dataclass(frozen=True, slots=True)
class PassTrace:
    """What one pass did to a graph, for people."""

    name: str
    changed: bool
    nodes: int  # left after it
    misses: tuple[Miss, ...]
    text: str  # the graph after it, one node a line


def trace_passes(model: ir.Model) -> list[PassTrace]:
    """Run the fusion passes one by one over a copy of a canonical graph."""
    graph = model.clone().graph
    found = []
    for rule in FUSION:
        fusion = Fuse(rule)
        changed = bool(run_passes(graph, [fusion]))
        run_passes(graph, [RemoveDead()])
        lines = [f"{', '.join(str(v.name) for v in node.outputs)} = {_line(node)}" for node in graph]
        found.append(PassTrace(fusion.name, changed, len(lines), tuple(fusion.misses), "\n".join(lines)))
    return found


def _line(node: ir.Node) -> str:
    values = ", ".join("-" if v is None else str(v.name) for v in node.inputs)
    attributes = ", ".join(f"{a.name}={a.value}" for a in node.attributes.values() if not hasattr(a.value, "numpy"))
    return f"{node.domain + '::' if node.domain else ''}{node.op_type}({values}" + (f"; {attributes})" if attributes else ")")


def plan_bundle(bundle: GraphBundle, options: CompileOptions) -> Plan:
    """Inventory, fusion, lowering, formats and memory of every submodel; reads no weight.

    Raises:
        UnsupportedError, UsageError.
    """
    context = options.check(bundle.spec)
    target = load_target(options.target)
    inventory = take_inventory(list(bundle.graphs.values()))
    origin = bundle.source.origin or bundle.source.kind
    table = ParameterTable(bundle.tensors, options.quant, keep=origin != "hf")
    lowered = {role: lower(fuse_graph(graph), table) for role, graph in bundle.graphs.items()}
    kv = _kv_spec(list(lowered.values()), options.kv_dtype)
    shards = Shards(len(target.chips))
    return Plan(inventory, draft_submodels(lowered, kv, options, context, shards), table, shards, kv, target)


def compile_into(bundle: GraphBundle, writer: CalbinWriter, options: CompileOptions, progress: Progress | None = None) -> Manifest:
    """Compile a bundle into a staging directory; the manifest still lacks goldens and is not written.

    Raises:
        UnsupportedError, UsageError, SourceError.
    """
    progress = progress or Silent()
    progress.stage("plan")
    plan = plan_bundle(bundle, options)
    spec = bundle.spec if bundle.spec.encoder is not None else msgspec.structs.replace(bundle.spec, layers=plan.kv.layers)
    return emit(Emission(bundle, spec, plan.target, plan.kv, plan.drafts, plan.table, plan.shards), writer, progress)


def _kv_spec(lowered: Sequence[Lowered], dtype: KVDType) -> KVSpec:
    first = lowered[0]
    for other in lowered[1:]:
        if (other.kv_inputs, other.kv) != (first.kv_inputs, first.kv):
            raise UnsupportedError(
                f"prefill has {len(first.kv_inputs)} KV layers, decode {len(other.kv_inputs)}, or in another order",
                where="graphs",
                remedy="change both graphs alike",
            )
    layers = len(first.kv_inputs)
    return KVSpec(
        kind="paged",
        dtype=dtype,
        layers=layers,
        heads=first.kv.heads,
        head_dim=first.kv.head_dim,
        block_positions=BLOCK_POSITIONS,
        bytes_per_block=layers * first.kv.heads * BLOCK_POSITIONS * dtype.position_bytes(first.kv.head_dim),
    )
