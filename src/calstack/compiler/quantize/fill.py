"""Planned parameters -> the bytes of the shard."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from calstack.calbin.packing import packed_bytes
from calstack.compiler.pack import gate_up_order, pack_codes, pack_floats
from calstack.compiler.quantize.codes import Codes, join, take_rows
from calstack.compiler.quantize.importing import import_w4, import_w8
from calstack.compiler.quantize.search import search_w4, search_w8
from calstack.compiler.quantize.table import ParameterTable, VectorPlan, WeightPlan
from calstack.errors import SourceError
from calstack.specs import WeightFormat

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from calstack.calbin.program import Weight
    from calstack.graph.model import StoredTensor

    Bytes = npt.NDArray[np.uint8]
    Floats = npt.NDArray[np.float32]
    Ranges = tuple[tuple[int, int], ...]

__all__ = ["fill", "piece_bytes", "piece_rows"]

_ELEMENT = {WeightFormat.F32: np.dtype(np.float32), WeightFormat.F16: np.dtype(np.float16), WeightFormat.BF16: np.dtype(ml_dtypes.bfloat16)}


def piece_rows(plan: WeightPlan | VectorPlan, rows: Ranges) -> int:
    """Outputs of a piece; no ranges = all."""
    whole = plan.weight.n if isinstance(plan, WeightPlan) else plan.vector.n
    return sum(end - begin for begin, end in rows) if rows else whole


def piece_bytes(plan: WeightPlan | VectorPlan, rows: Ranges) -> int:
    """Packed size of a piece."""
    if isinstance(plan, VectorPlan):
        return 4 * piece_rows(plan, rows)
    w = plan.weight
    return packed_bytes(w.format, piece_rows(plan, rows), w.k, w.group, w.minimum)


def fill(plan: WeightPlan | VectorPlan, table: ParameterTable, pieces: Sequence[Ranges] = ((),)) -> Iterator[Bytes]:
    """The packed bytes of each piece of a planned tensor: ranges of its rows, none = all.

    Raises:
        SourceError: when a weight holds NaN or infinity.
    """
    if isinstance(plan, VectorPlan):
        return _vectors(plan, table, pieces)
    return _floats(plan, pieces) if plan.weight.format in _ELEMENT else _quantised(plan, pieces)


def _vectors(plan: VectorPlan, table: ParameterTable, pieces: Sequence[Ranges]) -> Iterator[Bytes]:
    values = np.concatenate([_finite(table.floats(part), str(part.name)).reshape(-1) for part in plan.parts])
    if plan.plus_one:
        values = np.float32(1) + values
    if plan.interleave:
        values = values[gate_up_order(len(values) // 2)]
    for rows in pieces:
        chosen = values[_order(None, rows)] if rows else values
        yield np.ascontiguousarray(chosen, np.float32).view(np.uint8)


def _floats(plan: WeightPlan, pieces: Sequence[Ranges]) -> Iterator[Bytes]:
    values = np.concatenate([_cast(part, plan.weight.format) for part in plan.parts])
    whole = gate_up_order(plan.weight.n // 2) if plan.interleave else None
    for rows in pieces:
        order = _order(whole, rows)
        yield pack_floats(values if order is None else values[order])


def _quantised(plan: WeightPlan, pieces: Sequence[Ranges]) -> Iterator[Bytes]:
    codes = join([_codes(part, plan.weight, exact=exact) for part, exact in zip(plan.parts, plan.choice.exact, strict=True)])
    whole = gate_up_order(plan.weight.n // 2) if plan.interleave else None
    for rows in pieces:
        order = _order(whole, rows)
        yield pack_codes(codes if order is None else take_rows(codes, order))


def _order(whole: npt.NDArray[np.intp] | None, rows: Ranges) -> npt.NDArray[np.intp] | None:
    """Source rows of a piece in their packed order; None = all as they are."""
    if not rows:
        return whole
    places = np.concatenate([np.arange(begin, end, dtype=np.intp) for begin, end in rows])
    return places if whole is None else whole[places]


def _matrix(part: StoredTensor) -> Floats:
    """Experts one under the other."""
    return part.float32().reshape(-1, part.shape[-1])


def _cast(part: StoredTensor, fmt: WeightFormat) -> npt.NDArray[np.generic]:
    with np.errstate(over="ignore"):  # what overflows f16 is infinite, and refused
        values = _finite(_matrix(part), part.name).astype(_ELEMENT[fmt])
    _finite(values, part.name)
    return values


def _codes(part: StoredTensor, weight: Weight, *, exact: bool) -> Codes:
    wide = weight.format is WeightFormat.W8A8
    if exact:
        codes = import_w8(part) if wide else import_w4(part, minimum=weight.minimum)
        if codes is None:
            raise SourceError("its block scales overflow f16 as minima", where=part.name, remedy="compile with --quant w8a8")
        _finite(codes.scale, part.name)
        if codes.minimum is not None:
            _finite(codes.minimum, part.name)
        return codes
    values = _matrix(part)
    _finite(values, part.name)
    return search_w8(values, group=weight.group) if wide else search_w4(values, group=weight.group, minimum=weight.minimum)


def _finite(values: npt.NDArray[np.generic], name: str) -> npt.NDArray[np.generic]:
    if not np.isfinite(values).all():
        raise SourceError("holds NaN or infinity", where=f"tensor {name}", remedy="fetch the model anew")
    return values
