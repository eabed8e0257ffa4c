"""Planning before a compile: what a model takes on a target, chip by chip, and how fast it should run. Reads no weight.

The same passes run as in a compile, so the numbers are the artifact's own, to the byte.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from calstack.calbin.packing import LANES, packed_bytes
from calstack.calbin.program import Embed
from calstack.errors import UsageError
from calstack.specs import Role
from calstack.targets.cost import Load, launch_cost
from calstack.targets.spec import Figure, TargetSpec

if TYPE_CHECKING:
    from calstack.calbin.manifest import KVSpec
    from calstack.calbin.program import Call, Program, Weight
    from calstack.compiler.options import CompileOptions
    from calstack.compiler.pipeline import Plan

__all__ = ["ChipPlan", "PlanReport", "Speed", "make_plan", "measured"]

READ_SHARE, INT8_SHARE = 0.88, 0.61  # of its ceilings that this machine's programs reach (fitted)
TILE_ROWS = 64  # activations of one tile that a chip's SRAM must hold beside two blocks of weights
_DECODE_DEPTH, _PREFILL = 64, 512


class _Node(msgspec.Struct, frozen=True, kw_only=True):
    pass


class ChipPlan(_Node, frozen=True, kw_only=True):
    """One chip: bytes, and what is left for the cache."""

    id: int
    params_bytes: int
    activation_bytes: int
    kv_bytes_per_token: int
    dram_bytes: int  # 0 = the machine's own
    sram_bytes: int
    largest_tile_bytes: int
    kv_blocks_left: int  # -1 = not bounded by the spec


class Speed(_Node, frozen=True, kw_only=True):
    """A prediction; `board` is what the hardware's owners measured for this geometry."""

    phase: str
    tokens: int  # of the prompt, or in the cache
    batch: int
    tok_s: float
    board_tok_s: float | None = None
    share: dict[str, float] = {}  # of time, by operator


class PlanReport(_Node, frozen=True, kw_only=True):
    """The whole plan: `calstack plan --json` prints this object."""

    model: str
    target: str
    quant: str
    kv_dtype: str
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    fits: bool
    limits: tuple[str, ...]  # that are broken, with what would fit
    chips: tuple[ChipPlan, ...]
    kv_bytes_per_token: int
    h2d_bytes_per_step: int
    d2h_bytes_per_step: int
    artifact_bytes: int
    compile_s: float
    plan_s: float
    speeds: tuple[Speed, ...]
    fitted: tuple[str, ...]  # parameters of the prediction that are not from a data sheet


def measured(target: TargetSpec, read_gb_s: float, int8_gop_s: float) -> TargetSpec:
    """The spec of a target whose figures are this machine's, with its ceilings as measured."""
    speeds = msgspec.structs.replace(
        target.speeds,
        read_gb_s=Figure(value=round(READ_SHARE * read_gb_s, 1), origin="measured", note=f"{READ_SHARE} (fitted) of a prefetching read"),
        int8_gop_s=Figure(value=round(INT8_SHARE * int8_gop_s), origin="measured", note=f"{INT8_SHARE} (fitted) of the peak in registers"),
    )
    return msgspec.structs.replace(target, speeds=speeds)


def make_plan(
    source: Path,
    options: CompileOptions,
    target_for: Callable[[int], TargetSpec],
    *,
    contexts: Sequence[int] = (),
    quant: str = "source",
) -> PlanReport:
    """Plan a compile of `source`; `target_for` gives the spec of the target that `options` name, for so many bytes of parameters.

    Raises:
        SourceError, UnsupportedError, UsageError: as a compile would, before any long work.
    """
    from calstack.compiler.pipeline import plan_bundle
    from calstack.frontends import open_source

    start = time.perf_counter()
    bundle = open_source(source)
    wanted = tuple(sorted(contexts)) or (min(bundle.spec.context, options.context or 8192),)
    if wanted[-1] > bundle.spec.context:
        raise UsageError(f"the model has {bundle.spec.context} positions", where="--context", remedy=f"{wanted[-1]} was asked for")
    plan = plan_bundle(bundle, msgspec.structs.replace(options, context=wanted[-1]))
    target = target_for(_parameters(plan, 0))
    chips = tuple(_chip(plan, target, chip) for chip in range(plan.shards.chips))
    limits = tuple(_limits(chips, wanted, max(options.batches), plan.kv.block_positions))
    parameters = sum(chip.params_bytes for chip in chips)
    return PlanReport(
        model=bundle.spec.name,
        target=target.name,
        quant=quant,
        kv_dtype=plan.kv.dtype.value,
        contexts=wanted,
        batches=options.batches,
        fits=not limits,
        limits=limits,
        chips=chips,
        kv_bytes_per_token=plan.kv.bytes_per_block // plan.kv.block_positions,
        h2d_bytes_per_step=16 + 4 * -(-wanted[-1] // plan.kv.block_positions),
        d2h_bytes_per_step=4,
        artifact_bytes=parameters + len(bundle.tokenizer_json),
        compile_s=round(parameters / 60e6, 1),
        plan_s=round(time.perf_counter() - start, 3),
        speeds=tuple(_speeds(plan, target, bundle.spec)),
        fitted=tuple(f"{name} = {figure.value:g} ({figure.origin})" for name, figure in _figures(target) if figure.origin != "datasheet"),
    )


def _figures(target: TargetSpec) -> list[tuple[str, Figure]]:
    return [(name, getattr(target.speeds, name)) for name in target.speeds.__struct_fields__]


def _parameters(plan: Plan, chip: int) -> int:
    from calstack.compiler.emit import chip_bytes

    return chip_bytes(plan.table, plan.shards, plan.drafts, plan.kv, chip)[0]


def _chip(plan: Plan, target: TargetSpec, chip: int) -> ChipPlan:
    from calstack.compiler.emit import chip_bytes

    spec = target.chips[chip]
    parameters, activations, block = chip_bytes(plan.table, plan.shards, plan.drafts, plan.kv, chip)
    room = spec.dram_bytes - parameters - activations
    return ChipPlan(
        id=chip,
        params_bytes=parameters,
        activation_bytes=activations,
        kv_bytes_per_token=block // plan.kv.block_positions,
        dram_bytes=spec.dram_bytes,
        sram_bytes=spec.sram_bytes,
        largest_tile_bytes=max(_tile(call) for draft in plan.drafts for call in draft.program.streams[chip]),
        kv_blocks_left=max(room // block, -1) if spec.dram_bytes else -1,
    )


def _tile(call: Call) -> int:
    """Bytes of a call's tile: two blocks of sixteen outputs in turn, and the activations of a few rows."""
    weight: Weight | None = getattr(call, "weight", None)
    if weight is None or isinstance(call, Embed):
        return 0
    block = packed_bytes(weight.format, LANES, weight.k, weight.group, weight.minimum)
    return 2 * block + TILE_ROWS * (weight.k + 4 * LANES)


def _limits(chips: Sequence[ChipPlan], contexts: Sequence[int], batch: int, block_positions: int) -> list[str]:
    found = []
    for chip in chips:
        if not chip.dram_bytes:
            continue
        fixed = chip.params_bytes + chip.activation_bytes
        if fixed > chip.dram_bytes:
            found.append(
                f"chip {chip.id}: parameters and activations take {fixed} bytes of {chip.dram_bytes}; "
                f"weights of {chip.dram_bytes / fixed:.0%} of the size would fit: fewer bits in --quant, or more chips"
            )
            continue
        tokens = chip.kv_blocks_left * block_positions
        found += [
            f"chip {chip.id}: {context} positions need {context * chip.kv_bytes_per_token} bytes of cache, {tokens} positions fit"
            for context in contexts
            if context > tokens
        ]
        if batch > 1 and contexts[0] * batch > tokens:
            found.append(f"chip {chip.id}: {batch} lanes of {contexts[0]} positions do not fit together, {tokens // contexts[0]} do")
        if chip.sram_bytes and chip.largest_tile_bytes > chip.sram_bytes:
            found.append(f"chip {chip.id}: a tile of {chip.largest_tile_bytes} bytes is larger than the SRAM of {chip.sram_bytes}")
    return found


def _speeds(plan: Plan, target: TargetSpec, spec: Any) -> list[Speed]:
    from calstack.compiler.partition import shares

    heads = [end - begin for begin, end in shares(plan.kv.heads, plan.shards.chips)]
    prefill = next(d for d in plan.drafts if d.submodel.role is Role.PREFILL)
    decodes = [d for d in plan.drafts if d.submodel.role is Role.DECODE]
    found = [_predict("prefill", prefill.program, plan.kv, target, heads, min(_PREFILL, prefill.submodel.q_len), 1)]
    found += [_predict("decode", d.program, plan.kv, target, heads, _DECODE_DEPTH, d.submodel.batch) for d in decodes]
    experts = spec.moe.experts if spec.moe is not None else 0
    for known in target.known:
        if (known.layers, known.hidden, known.experts) != (spec.layers, spec.hidden, experts):
            continue
        program = prefill.program if known.phase == "prefill" else decodes[0].program
        own = _predict(known.phase, program, plan.kv, target, heads, known.tokens, 1)
        found.append(msgspec.structs.replace(own, board_tok_s=known.tok_s))
    return found


def _predict(phase: str, program: Program, kv: KVSpec, target: TargetSpec, heads: Sequence[int], tokens: int, batch: int) -> Speed:
    if phase == "prefill":
        load, made = Load(tokens=tokens, head_rows=1, keys=tokens / 2, lanes=1), tokens
    else:
        load, made = Load(tokens=batch, head_rows=batch, keys=float(tokens), lanes=batch), batch
    cost = launch_cost(program, load, kv, target.speeds, kv_heads=heads)
    share = {op: round(seconds / cost.seconds, 4) for op, seconds in sorted(cost.by_op.items(), key=lambda item: -item[1])}
    return Speed(phase=phase, tokens=tokens, batch=batch, tok_s=round(made / cost.seconds, 2), share=share)
