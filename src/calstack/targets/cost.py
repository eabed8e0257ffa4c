"""Cost model v0: time of a launch from the program's own calls. No model is named here: a call's shapes and formats are all it sees.

A call takes the longer of its bytes over the chip's read bandwidth and its operations over the chip's rate, plus a constant. Chips run
side by side between the points where they meet, so a stretch takes as long as its slowest chip.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

from calstack.calbin.manifest import KVSpec
from calstack.calbin.packing import weight_bytes
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
    Program,
    QkNormRopeKv,
    Weight,
)
from calstack.targets.spec import Speeds

__all__ = ["CallCost", "LaunchCost", "Load", "cost_of_call", "launch_cost"]


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """What a launch is asked: tokens over all lanes, rows of logits, keys that each token sees on average, lanes."""

    tokens: int
    head_rows: int
    keys: float
    lanes: int

    @property
    def keys_read(self) -> float:
        """Positions of the cache read: tokens of a lane share each read."""
        return self.lanes * self.keys


@dataclasses.dataclass(frozen=True, slots=True)
class CallCost:
    """Work of one call: bytes moved, int8 and float operations (a product and its sum are two)."""

    bytes: float
    int8_ops: float = 0.0
    float_ops: float = 0.0

    def seconds(self, speeds: Speeds) -> float:
        """Time of the call."""
        compute = self.int8_ops / (1e9 * speeds.int8_gop_s.value) + self.float_ops / (1e9 * speeds.float_gop_s.value)
        return max(self.bytes / (1e9 * speeds.read_gb_s.value), compute) + 1e-6 * speeds.call_us.value


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchCost:
    """Predicted time of a launch, and where it goes."""

    seconds: float
    by_op: dict[str, float]  # seconds of the slowest chip, by operator; meetings are under all_gather


def launch_cost(program: Program, load: Load, kv: KVSpec, speeds: Speeds, *, kv_heads: Sequence[int]) -> LaunchCost:
    """Time of a launch of `program`.

    Args:
        load: what it is asked.
        kv: of the calbin; `kv_heads` says how many of its heads each chip has.
        speeds: of a chip.
    """
    by_op: dict[str, float] = defaultdict(float)
    total = 1e-6 * speeds.launch_us.value
    for stretch in zip(*(_stretches(stream) for stream in program.streams), strict=True):
        costs = [
            [(call.OP, cost_of_call(call, load, kv, heads).seconds(speeds)) for call in calls]
            for calls, heads in zip(stretch, kv_heads, strict=True)
        ]
        slowest = max(costs, key=lambda calls: sum(seconds for _, seconds in calls))
        for op, seconds in slowest:
            by_op[op] += seconds
            total += seconds
        if len(program.streams) > 1:
            by_op["all_gather"] += 1e-6 * speeds.sync_us.value
            total += 1e-6 * speeds.sync_us.value
    return LaunchCost(total, dict(by_op))


def _stretches(stream: Sequence[Call]) -> list[list[Call]]:
    """Calls between meetings."""
    found: list[list[Call]] = [[]]
    for call in stream:
        found[-1].append(call)
        if isinstance(call, AllGather | MoeCombine) and call.sync:
            found.append([])
    return found


def cost_of_call(call: Call, load: Load, kv: KVSpec, kv_heads: int) -> CallCost:
    """Work of one call of a chip that holds `kv_heads` heads of the cache."""
    n = load.tokens
    match call:
        case NormLinear() | Linear() | MoeRoute():
            return _product(call.weight, n)
        case LmHead():
            return _product(call.weight, load.head_rows)
        case MoeExperts():
            return _experts(call, n)
        case Attention():
            position = kv.layers and kv.bytes_per_block / kv.layers / kv.heads / kv.block_positions
            read = load.keys_read * position * kv_heads
            return CallCost(read + 8.0 * n * call.heads * call.head_dim, float_ops=4.0 * n * load.keys * call.heads * call.head_dim)
        case Embed():
            return CallCost(n * (weight_bytes(call.weight) / max(call.weight.n, 1) + 4.0 * call.weight.k))
        case NormAdd():
            return CallCost(12.0 * n * call.norm.n)
        case QkNormRopeKv():
            return CallCost(8.0 * n * (call.heads + 2 * call.kv_heads) * call.head_dim)
        case LayerNorm():
            return CallCost(8.0 * n * call.norm.n)
        case EncoderAttention():
            width = call.heads * call.head_dim
            return CallCost(16.0 * n * (call.heads + 2 * call.kv_heads) * call.head_dim, float_ops=4.0 * n * load.keys * width)
        case Classify():
            both = [_product(weight, load.lanes) for weight in (call.weight, call.head)]
            return CallCost(sum(c.bytes for c in both), sum(c.int8_ops for c in both), sum(c.float_ops for c in both))
        case _:
            return CallCost(0.0)


def _product(weight: Weight, rows: int) -> CallCost:
    if rows == 0:
        return CallCost(0.0)
    ops = 2.0 * rows * weight.n * weight.k
    nbytes = weight_bytes(weight) + 4.0 * rows * (weight.n + weight.k)
    return CallCost(nbytes, int8_ops=ops) if weight.group else CallCost(nbytes, float_ops=ops)


def _experts(call: MoeExperts, tokens: int) -> CallCost:
    """Experts chosen independently by every token."""
    chosen = call.top_k / call.all_experts
    distinct = call.experts * (1.0 - (1.0 - chosen) ** tokens)
    pairs = tokens * chosen * call.experts
    weights = (weight_bytes(call.weight) + weight_bytes(call.down)) / call.experts * distinct
    ops = 6.0 * pairs * call.down.k * call.weight.k
    return CallCost(weights + 8.0 * pairs * (call.down.k + call.weight.k), int8_ops=ops)
