"""Planned parameters -> the bytes of the shard."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from calstack.compiler.pack import gate_up_order, pack_codes, pack_floats
from calstack.compiler.quantize.codes import Codes, join, take_rows
from calstack.compiler.quantize.importing import import_w4, import_w8
from calstack.compiler.quantize.search import search_w4, search_w8
from calstack.compiler.quantize.table import ParameterTable, VectorPlan, WeightPlan
from calstack.errors import SourceError
from calstack.specs import WeightFormat

if TYPE_CHECKING:
    import numpy.typing as npt

    from calstack.calbin.program import Weight
    from calstack.graph.model import StoredTensor

    Bytes = npt.NDArray[np.uint8]
    Floats = npt.NDArray[np.float32]

__all__ = ["fill"]

_ELEMENT = {WeightFormat.F32: np.dtype(np.float32), WeightFormat.F16: np.dtype(np.float16), WeightFormat.BF16: np.dtype(ml_dtypes.bfloat16)}


def fill(plan: WeightPlan | VectorPlan, table: ParameterTable) -> Bytes:
    """The packed bytes of one planned tensor, `plan.bytes` of them.

    Raises:
        SourceError: when a weight holds NaN or infinity.
    """
    return _vector(plan, table) if isinstance(plan, VectorPlan) else _weight(plan)


def _vector(plan: VectorPlan, table: ParameterTable) -> Bytes:
    values = np.concatenate([_finite(table.floats(part), str(part.name)).reshape(-1) for part in plan.parts])
    if plan.plus_one:
        values = np.float32(1) + values
    if plan.interleave:
        values = values[gate_up_order(len(values) // 2)]
    return np.ascontiguousarray(values, np.float32).view(np.uint8)


def _weight(plan: WeightPlan) -> Bytes:
    order = gate_up_order(plan.weight.n // 2) if plan.interleave else None
    if plan.weight.format in _ELEMENT:
        rows = np.concatenate([_cast(part, plan.weight.format) for part in plan.parts])
        return pack_floats(rows if order is None else rows[order])
    parts = [_codes(part, plan.weight, exact=exact) for part, exact in zip(plan.parts, plan.choice.exact, strict=True)]
    codes = join(parts)
    return pack_codes(codes if order is None else take_rows(codes, order))


def _cast(part: StoredTensor, fmt: WeightFormat) -> npt.NDArray[np.generic]:
    with np.errstate(over="ignore"):  # what overflows f16 is infinite, and refused
        values = _finite(part.float32(), part.name).astype(_ELEMENT[fmt])
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
    values = part.float32()
    _finite(values, part.name)
    return search_w8(values, group=weight.group) if wide else search_w4(values, group=weight.group, minimum=weight.minimum)


def _finite(values: npt.NDArray[np.generic], name: str) -> npt.NDArray[np.generic]:
    if not np.isfinite(values).all():
        raise SourceError("holds NaN or infinity", where=f"tensor {name}", remedy="fetch the model anew")
    return values
