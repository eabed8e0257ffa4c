"""The masks of a sliding window and of a text, as the canonical graphs write them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from calstack.compiler.fuse.match import made_by, scalar
from calstack.graph.names import CUR_LEN, INPUT_IDS, POSITIONS

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["is_text_mask", "window_of"]

_OTHER = "its mask is not the one of a sliding window: positions - Range(0, past + q_len, 1) < window"


def window_of(mask: ir.Value | None) -> int | str:
    """The window that `mask` stands for, 0 for no mask, or why it is none."""
    if mask is None:
        return 0
    less = made_by(mask, "Less")
    window = scalar(less.inputs[1]) if less is not None else None
    distance = made_by(less.inputs[0], "Sub") if less is not None else None
    if window is None or distance is None:
        return _OTHER
    if window < 1 or window != int(window):
        return f"its window is {window:g}"
    queries = made_by(distance.inputs[0], "Unsqueeze")
    if queries is None or queries.inputs[0] is None or queries.inputs[0].name != POSITIONS or not queries.inputs[0].is_graph_input():
        return _OTHER
    return int(window) if _all_keys(distance.inputs[1], queries.inputs[0]) else _OTHER


def _all_keys(keys: ir.Value | None, positions: ir.Value) -> bool:
    """Whether `keys` counts from 0 over the past and this call's tokens."""
    numbers = made_by(keys, "Range")
    if numbers is None or scalar(numbers.inputs[0]) != 0 or scalar(numbers.inputs[2]) != 1:
        return False
    total = made_by(numbers.inputs[1], "Squeeze")
    parts = made_by(total.inputs[0], "Add") if total is not None else None
    if parts is None:
        return False
    shapes = [made_by(part, "Shape") for part in parts.inputs]
    measured = [None if shape is None else (shape.inputs[0], _axis(shape)) for shape in shapes]
    past = [value for value, axis in filter(None, measured) if axis == 2 and value is not None and (value.name or "").startswith("kv.")]
    return len(past) == 1 and past[0].is_graph_input() and (positions, 1) in measured


def is_text_mask(mask: ir.Value | None) -> bool:
    """Whether `mask` lets every row see the first cur_seq_len rows: Expand(Unsqueeze(Range(0, q_len, 1) < cur_seq_len))."""
    expand = made_by(mask, "Expand")
    columns = made_by(expand.inputs[0], "Unsqueeze") if expand is not None else None
    less = made_by(columns.inputs[0], "Less") if columns is not None else None
    if less is None:
        return False
    rows, lengths = made_by(less.inputs[0], "Range"), made_by(less.inputs[1], "Unsqueeze")
    if rows is None or lengths is None or scalar(rows.inputs[0]) != 0 or scalar(rows.inputs[2]) != 1:
        return False
    width = made_by(rows.inputs[1], "Squeeze")
    shape = made_by(width.inputs[0], "Shape") if width is not None else None
    read = None if shape is None or _axis(shape) != 1 else shape.inputs[0]
    return read is not None and read.is_graph_input() and read.name == INPUT_IDS and lengths.inputs[0].name == CUR_LEN


def _axis(shape: ir.Node) -> int:
    """The one axis a Shape node gives, -1 when it gives more."""
    start, end = shape.attributes.get("start"), shape.attributes.get("end")
    return -1 if start is None or end is None or end.as_int() != start.as_int() + 1 else start.as_int()
