"""Work of a launch as coefficients, counted from the program's calls."""

from __future__ import annotations

from collections.abc import Sequence

from calstack.calbin.manifest import KVSpec, Workload
from calstack.calbin.packing import weight_bytes
from calstack.calbin.program import (
    Attention,
    Call,
    Classify,
    Embed,
    EncoderAttention,
    Linear,
    LmHead,
    MoeExperts,
    MoeRoute,
    NormLinear,
    Weight,
)

__all__ = ["workloads"]


def workloads(calls: Sequence[Call], kv: KVSpec, *, head_rows: int | None) -> tuple[Workload, Workload]:
    """MACs and bytes of a launch.

    Every token passes every product; the head counts `head_rows` rows per launch, or one per token where that is None.
    Bytes: packed weights are read once per launch, those of an expert when some token chose it (`per_expert` is one expert of every layer,
    times the distinct experts of a layer); a token writes its K and V and reads one embedding row; a past token is read once.
    """
    linears = [call.weight for call in calls if isinstance(call, NormLinear | Linear | MoeRoute)]
    experts = [call for call in calls if isinstance(call, MoeExperts)]
    chosen = sum(call.top_k * (_macs(call.weight) + _macs(call.down)) // call.experts for call in experts)
    heads = [call.weight for call in calls if isinstance(call, LmHead)]
    heads += [weight for call in calls if isinstance(call, Classify) for weight in (call.weight, call.head)]
    body, head = sum(map(_macs, linears)), sum(map(_macs, heads))
    attention = sum(2 * call.heads * call.head_dim for call in calls if isinstance(call, Attention | EncoderAttention))
    token_kv = kv.bytes_per_block // kv.block_positions
    rows = sum(weight_bytes(call.weight) // max(call.weight.n, 1) for call in calls if isinstance(call, Embed))
    return (
        Workload(
            unit="macs",
            constant=float(head * (head_rows or 0)),
            per_token=float(body + chosen + (head if head_rows is None else 0)),
            per_past_token=float(attention),
        ),
        Workload(
            unit="bytes",
            constant=float(sum(map(weight_bytes, linears)) + sum(map(weight_bytes, heads))),
            per_token=float(token_kv + rows),
            per_past_token=float(token_kv),
            per_expert=float(sum((weight_bytes(call.weight) + weight_bytes(call.down)) // call.experts for call in experts)),
        ),
    )


def _macs(weight: Weight) -> int:
    return weight.n * weight.k
