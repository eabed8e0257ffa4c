"""Whether a device's answer can be what the launch asked for: a device that answers nonsense is asked again, then given up."""

from __future__ import annotations

from calstack.devices.base import Completion, LaneInput, LaneOutput, LogitRows
from calstack.errors import DeviceError, DeviceRetryable
from calstack.runtime.plan import LaunchPlan

__all__ = ["bad_answer"]


def bad_answer(plan: LaunchPlan, completion: Completion, vocab: int) -> DeviceError | None:
    """The error that an impossible answer amounts to, or None when it may be right."""
    if len(completion.lanes) != len(plan.lanes):
        what = f"{len(completion.lanes)} lanes instead of {len(plan.lanes)}"
    else:
        pairs = enumerate(zip(plan.lanes, completion.lanes, strict=True))
        wrong = [i for i, (lane, out) in pairs if lane.emit and not _has_tokens(lane, out, vocab)]
        if wrong:
            what = f"no token of the vocabulary in lane {wrong[0]}"
        elif not all(map(_has_logits, plan.lanes, completion.lanes)):
            what = "not the logits that were asked for"
        else:
            return None
    return DeviceRetryable(f"the answer has {what}", where=plan.submodel)


def _has_tokens(lane: LaneInput, out: LaneOutput, vocab: int) -> bool:
    ids = [*(row.token for row in out.before), out.token]
    return len(ids) == lane.emit_rows and all(0 <= token < vocab for token in ids)


def _has_logits(lane: LaneInput, out: LaneOutput) -> bool:
    rows = {LogitRows.NONE: 0, LogitRows.LAST: 1, LogitRows.ALL: lane.cur_len}[lane.logits]
    return rows == 0 or (out.logits is not None and len(out.logits) == rows)
