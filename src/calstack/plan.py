"""Planning before a compile: what a model takes on a target, chip by chip, and how fast it should run. Reads no weight.

The same passes run as in a compile, so the numbers are the artifact's own, to the byte.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from calstack.calbin.packing import LANES, packed_bytes
from calstack.errors import UnsupportedError, UsageError
from calstack.specs import QuantSpec, Role, WeightFormat
from calstack.targets.cost import Load, launch_cost
from calstack.targets.spec import Figure, TargetSpec, load_target
from calstack.targets.tiles import ROWS, rows_that_fit, tile_bytes

if TYPE_CHECKING:
    from calstack.calbin.manifest import KVSpec
    from calstack.calbin.program import Call
    from calstack.compiler.options import CompileOptions
    from calstack.compiler.pipeline import Plan
    from calstack.specs import ModelSpec

__all__ = ["Bucket", "ChipPlan", "PlanReport", "Speed", "Tile", "make_plan", "measured"]

READ_SHARE, INT8_SHARE = 0.88, 0.61  # of its ceilings that this machine's programs reach (fitted)
HAND_OVERS, ROW_US = 2, 0.4  # of a call of one row
_DECODE_DEPTH, _PREFILL = 64, 512
_HOPELESS = 2.0  # times a target's DRAM: a model of that size is refused by its config alone


class _Node(msgspec.Struct, frozen=True, kw_only=True):
    pass


class Tile(_Node, frozen=True, kw_only=True):
    """The largest tile among a chip's calls of one operator, beside the SRAM."""

    op: str
    bytes: int  # with `ROWS` rows of activations
    rows_fit: int  # -1 = the SRAM's size is not known


class ChipPlan(_Node, frozen=True, kw_only=True):
    """One chip: bytes, and what is left for the cache."""

    id: int
    params_bytes: int
    activation_bytes: int
    kv_bytes_per_token: int
    dram_bytes: int  # 0 = the machine's own
    reserved_bytes: int  # of it, not for us
    sram_bytes: int
    largest_tile_bytes: int
    tiles: tuple[Tile, ...]  # of every operator, the largest first
    kv_blocks_left: int  # -1 = not bounded by the spec


class Bucket(_Node, frozen=True, kw_only=True):
    """A batch of requests that fill a context: what their cache takes and how fast they decode at its end."""

    batch: int
    context: int
    kv_bytes: int  # over all chips
    kv_blocks: int
    lanes_fit: int  # such requests that fit together, on the fullest chip; -1 = not bounded by the spec
    fits: bool
    tok_s: float  # over the batch


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
    buckets: tuple[Bucket, ...]
    kv_bytes_per_token: int
    h2d_bytes_per_step: int
    d2h_bytes_per_step: int
    artifact_bytes: int
    compile_s: float
    plan_s: float
    speeds: tuple[Speed, ...]
    fitted: tuple[str, ...]  # parameters of the prediction that are not from a data sheet


def measured(target: TargetSpec, read_gb_s: float, int8_gop_s: float, hand_over_us: float) -> TargetSpec:
    """The spec of a target whose figures are this machine's, with its ceilings and the threads' hand-over as measured."""
    call = f"{HAND_OVERS} hand-overs of {hand_over_us:.2f} between the threads, and {ROW_US} (fitted) for a row's quantisation"
    speeds = msgspec.structs.replace(
        target.speeds,
        read_gb_s=Figure(value=round(READ_SHARE * read_gb_s, 1), origin="measured", note=f"{READ_SHARE} (fitted) of a prefetching read"),
        int8_gop_s=Figure(value=round(INT8_SHARE * int8_gop_s), origin="measured", note=f"{INT8_SHARE} (fitted) of the peak in registers"),
        call_us=Figure(value=round(HAND_OVERS * hand_over_us + ROW_US, 2), origin="measured", note=call),
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
    from calstack.frontends import open_source, peek_spec

    start = time.perf_counter()
    if (spec := peek_spec(source)) is not None:
        _refuse_hopeless(spec, options)
    bundle = open_source(source)
    wanted = tuple(sorted(contexts)) or (min(bundle.spec.context, options.context or 8192),)
    if wanted[-1] > bundle.spec.context:
        raise UsageError(f"the model has {bundle.spec.context} positions", where="--context", remedy=f"{wanted[-1]} was asked for")
    plan = plan_bundle(bundle, msgspec.structs.replace(options, context=wanted[-1]))
    target = target_for(_parameters(plan, 0))
    chips = tuple(_chip(plan, target, chip) for chip in range(plan.shards.chips))
    limits = tuple(_limits(chips, wanted, max(options.batches), plan.kv.block_positions))
    parameters = sum(chip.params_bytes for chip in chips)
    model = _Model(plan, target)
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
        buckets=tuple(_bucket(model, chips, batch, context) for context in wanted for batch in options.batches if model.decodes),
        kv_bytes_per_token=plan.kv.bytes_per_block // plan.kv.block_positions,
        h2d_bytes_per_step=16 + 4 * -(-wanted[-1] // plan.kv.block_positions),
        d2h_bytes_per_step=4,
        artifact_bytes=parameters + len(bundle.tokenizer_json),
        compile_s=round(parameters / 60e6, 1),
        plan_s=round(time.perf_counter() - start, 3),
        speeds=tuple(_speeds(model, bundle.spec)),
        fitted=tuple(f"{name} = {figure.value:g} ({figure.origin})" for name, figure in _figures(target) if figure.origin != "datasheet"),
    )


def _figures(target: TargetSpec) -> list[tuple[str, Figure]]:
    return [(name, getattr(target.speeds, name)) for name in target.speeds.__struct_fields__]


def _parameters(plan: Plan, chip: int) -> int:
    from calstack.compiler.emit import chip_bytes

    return chip_bytes(plan.table, plan.shards, plan.drafts, plan.kv, chip)[0]


def _refuse_hopeless(spec: ModelSpec, options: CompileOptions) -> None:
    """A model far too large is refused by its config alone, before its graphs are built."""
    room = sum(chip.dram_bytes for chip in load_target(options.target).chips)
    least = _least_bytes(spec, options.quant)
    if room and least > _HOPELESS * room:
        raise UnsupportedError(
            f"the parameters alone take {least / 1e9:.1f} GB or more, all chips together have {room / 1e9:.1f} GB",
            where=f"plan for {options.target}",
            remedy=f"weights of {room / least:.0%} of the size would fit: a smaller model, fewer bits in --quant, or more chips",
        )


def _least_bytes(spec: ModelSpec, quant: QuantSpec) -> float:
    """What the matrices take in the smallest format that `quant` may choose."""
    formats = {f for f in (quant.default or WeightFormat.W4A8, quant.head, *(fmt for _, fmt in quant.overrides)) if f is not None}
    bits = min(packed_bytes(f, LANES, quant.group, quant.group, minimum=False) for f in formats) / (LANES * quant.group)
    attention = 2 * spec.head_dim * (spec.heads + spec.kv_heads)
    mlp = 3 * (spec.intermediate if spec.moe is None else spec.moe.experts * spec.moe.intermediate)
    if spec.encoder is not None:
        mlp = 2 * spec.intermediate
    return bits * spec.hidden * (spec.layers * (attention + mlp) + spec.vocab)


class _Model:
    """Predictions for the programs of a plan."""

    def __init__(self, plan: Plan, target: TargetSpec) -> None:
        from calstack.compiler.partition import shares

        self.plan, self.target = plan, target
        self._heads = [end - begin for begin, end in shares(plan.kv.heads, plan.shards.chips)]
        self.prompt = next((d for d in plan.drafts if d.submodel.role is not Role.DECODE), None)
        self.decodes = {d.submodel.batch: d for d in plan.drafts if d.submodel.role is Role.DECODE}

    def speed(self, phase: str, tokens: int, batch: int) -> Speed:
        """Prefill or encoding of one text of `tokens`, or a decode step of `batch` lanes over a cache of `tokens` each."""
        draft = self.decodes[batch] if phase == "decode" else self.prompt
        assert draft is not None, "asked of a plan that has the phase"
        if phase == "prefill":
            load, made = Load(tokens=tokens, head_rows=1, keys=tokens / 2, lanes=1), tokens
        elif phase == "encode":
            load, made = Load(tokens=tokens, head_rows=1, keys=float(tokens), lanes=1), tokens
        else:
            load, made = Load(tokens=batch, head_rows=batch, keys=float(tokens), lanes=batch), batch
        cost = launch_cost(draft.program, load, self.plan.kv, self.target.speeds, kv_heads=self._heads)
        share = {op: round(seconds / cost.seconds, 4) for op, seconds in sorted(cost.by_op.items(), key=lambda item: -item[1])}
        return Speed(phase=phase, tokens=tokens, batch=batch, tok_s=round(made / cost.seconds, 2), share=share)


def _chip(plan: Plan, target: TargetSpec, chip: int) -> ChipPlan:
    from calstack.compiler.emit import chip_bytes

    spec = target.chips[chip]
    parameters, activations, block = chip_bytes(plan.table, plan.shards, plan.drafts, plan.kv, chip)
    room = spec.dram_bytes - spec.reserved_bytes - parameters - activations
    tiles = _tiles([call for draft in plan.drafts for call in draft.program.streams[chip]], plan.kv, spec.sram_bytes)
    return ChipPlan(
        id=chip,
        params_bytes=parameters,
        activation_bytes=activations,
        kv_bytes_per_token=block // plan.kv.block_positions,
        dram_bytes=spec.dram_bytes,
        reserved_bytes=spec.reserved_bytes,
        sram_bytes=spec.sram_bytes,
        largest_tile_bytes=tiles[0].bytes,
        tiles=tiles,
        kv_blocks_left=max(room // block, 0) if spec.dram_bytes else -1,
    )


def _tiles(calls: Sequence[Call], kv: KVSpec, sram: int) -> tuple[Tile, ...]:
    largest: dict[str, Tile] = {}
    for call in calls:
        size = tile_bytes(call, kv)
        if call.OP not in largest or size > largest[call.OP].bytes:
            largest[call.OP] = Tile(op=call.OP, bytes=size, rows_fit=rows_that_fit(call, kv, sram) if sram else -1)
    return tuple(sorted(largest.values(), key=lambda tile: -tile.bytes))


def _bucket(model: _Model, chips: Sequence[ChipPlan], batch: int, context: int) -> Bucket:
    kv = model.plan.kv
    blocks = -(-context // kv.block_positions)
    lanes = min((chip.kv_blocks_left // blocks for chip in chips if chip.dram_bytes), default=-1)
    return Bucket(
        batch=batch,
        context=context,
        kv_bytes=batch * blocks * kv.bytes_per_block,
        kv_blocks=batch * blocks,
        lanes_fit=lanes,
        fits=lanes < 0 or batch <= lanes,
        tok_s=model.speed("decode", context, batch).tok_s,
    )


def _limits(chips: Sequence[ChipPlan], contexts: Sequence[int], batch: int, block_positions: int) -> list[str]:
    found = []
    for chip in chips:
        if not chip.dram_bytes:
            continue
        fixed, room = chip.params_bytes + chip.activation_bytes, chip.dram_bytes - chip.reserved_bytes
        if fixed > room:
            found.append(
                f"chip {chip.id}: parameters and activations take {fixed} bytes of {room}; "
                f"weights of {(room - chip.activation_bytes) / chip.params_bytes:.0%} of the size would fit: "
                "fewer bits in --quant, or more chips"
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
        found += [
            f"chip {chip.id}: a tile of {tile.op} takes {tile.bytes} bytes of SRAM, there are {chip.sram_bytes}; "
            f"{tile.rows_fit} rows at once would fit"
            for tile in chip.tiles
            if chip.sram_bytes and tile.rows_fit < ROWS
        ]
    return found


def _speeds(model: _Model, spec: ModelSpec) -> list[Speed]:
    found = []
    if model.prompt is not None:
        found.append(model.speed(model.prompt.submodel.role.value, min(_PREFILL, model.prompt.submodel.q_len), 1))
    found += [model.speed("decode", _DECODE_DEPTH, batch) for batch in model.decodes]
    experts = spec.moe.experts if spec.moe is not None else 0
    for known in model.target.known:
        if (known.layers, known.hidden, known.experts) == (spec.layers, spec.hidden, experts):
            own = model.speed(known.phase, known.tokens, min(model.decodes, default=1))
            found.append(msgspec.structs.replace(own, board_tok_s=known.tok_s))
    return found
