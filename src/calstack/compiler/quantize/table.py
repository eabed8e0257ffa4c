"""The parameters a compile writes: decided while programs are lowered, filled when they are emitted, each stored once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from calstack.calbin.manifest import TensorQuant
from calstack.calbin.packing import packed_bytes
from calstack.calbin.program import Vector, Weight
from calstack.compiler.fuse.match import constant
from calstack.compiler.quantize.policy import Choice, Source, choose
from calstack.errors import UnsupportedError
from calstack.graph.names import KIND_KEY
from calstack.specs import QuantSpec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import onnx_ir as ir

    from calstack.graph.model import StoredTensor

__all__ = ["ParameterTable", "VectorPlan", "WeightPlan"]


@dataclasses.dataclass(frozen=True, slots=True)
class WeightPlan:
    """A packed weight: `parts` stacked by rows, or interleaved gate and up blocks."""

    weight: Weight
    parts: tuple[StoredTensor, ...]
    choice: Choice
    interleave: bool

    @property
    def name(self) -> str:
        """Of the tensor."""
        return self.weight.tensor

    @property
    def bytes(self) -> int:
        """Packed size."""
        w = self.weight
        return packed_bytes(w.format, w.n, w.k, w.group, w.minimum)


@dataclasses.dataclass(frozen=True, slots=True)
class VectorPlan:
    """A raw f32 vector: `parts` one after the other (interleaved in blocks of 16 with `interleave`), plus one where asked."""

    vector: Vector
    parts: tuple[ir.Value, ...]
    plus_one: bool
    interleave: bool

    @property
    def name(self) -> str:
        """Of the tensor."""
        return self.vector.tensor

    @property
    def bytes(self) -> int:
        """Stored size."""
        return 4 * self.vector.n


class ParameterTable:
    """Hands out `Weight` and `Vector` references; asking twice for the same parts gives the same tensor."""

    def __init__(self, tensors: Mapping[str, StoredTensor], quant: QuantSpec, *, keep: bool) -> None:
        self._tensors, self._quant, self._keep = tensors, quant, keep
        self._plans: dict[str, WeightPlan | VectorPlan] = {}

    @property
    def plans(self) -> tuple[WeightPlan | VectorPlan, ...]:
        """Everything asked for, in order of first use: the order in the shard."""
        return tuple(self._plans.values())

    def weight(self, values: Sequence[ir.Value], *, head: bool = False, interleave: bool = False, router: bool = False) -> Weight:
        """A packed weight of these initializers `[n, k]` or `[experts, n, k]`, stacked by rows."""
        name = _joined([str(v.name) for v in values])
        plan = self._plans.get(name)
        if plan is None:
            plan = self._plans[name] = self._plan_weight(name, values, head=head, interleave=interleave, router=router)
        assert isinstance(plan, WeightPlan), name
        if plan.interleave != interleave:
            raise UnsupportedError("is used both gated and plain", where=name, remedy="store it twice in the graph")
        return plan.weight

    def vector(self, values: Sequence[ir.Value], *, plus_one: bool = False, interleave: bool = False) -> Vector:
        """A f32 vector of these initializers, one after the other."""
        name = _joined([str(v.name) for v in values]) + ("+1" if plus_one else "")
        plan = self._plans.get(name)
        if plan is None:
            n = sum(int(v.shape[0]) for v in values)
            plan = self._plans[name] = VectorPlan(Vector(tensor=name, n=n), tuple(values), plus_one, interleave)
        assert isinstance(plan, VectorPlan), name
        return plan.vector

    def floats(self, value: ir.Value) -> npt.NDArray[np.float32]:
        """The value of an initializer."""
        import numpy as np

        stored = self._tensors.get(str(value.name))
        if stored is not None:
            return stored.float32()
        array = constant(value)
        assert array is not None, value.name
        return np.asarray(array, np.float32)

    def quant(self) -> tuple[TensorQuant, ...]:
        """How every source tensor was stored, in shard order; norms and biases are f32 always and left out."""
        rows = []
        for plan in self._plans.values():
            if not isinstance(plan, WeightPlan):
                continue
            w = plan.weight
            for part, exact in zip(plan.parts, plan.choice.exact, strict=True):
                rows.append(TensorQuant(tensor=part.name, source=part.kind, format=w.format, group=w.group, minimum=w.minimum, exact=exact))
        return tuple(rows)

    def _plan_weight(self, name: str, values: Sequence[ir.Value], *, head: bool, interleave: bool, router: bool) -> WeightPlan:
        parts = tuple(self._stored(value) for value in values)
        k = parts[0].shape[-1]
        sources = [Source(p.name, p.kind, str(v.metadata_props.get(KIND_KEY, p.kind))) for p, v in zip(parts, values, strict=True)]
        choice = choose(sources, k=k, head=head, quant=self._quant, keep=self._keep, router=router)
        n = sum(math.prod(part.shape[:-1]) for part in parts)
        weight = Weight(tensor=name, format=choice.format, n=n, k=k, group=choice.group, minimum=choice.minimum)
        return WeightPlan(weight, parts, choice, interleave)

    def _stored(self, value: ir.Value) -> StoredTensor:
        stored = self._tensors.get(str(value.name))
        if stored is None or len(stored.shape) not in {2, 3} or tuple(stored.shape) != tuple(value.shape or ()):
            raise UnsupportedError("is no weight of the source", where=str(value.name), remedy="keep the graph's initializers")
        return stored


def _joined(names: Sequence[str]) -> str:
    """`a.q.w`, `a.k.w` -> `a.{q,k}.w`: the name of tensors packed as one."""
    if len(names) == 1:
        return names[0]
    columns = list(zip(*(name.split(".") for name in names), strict=False))
    differ = [index for index, column in enumerate(columns) if len(set(column)) > 1]
    if len(differ) != 1 or len({name.count(".") for name in names}) != 1:
        return "+".join(names)
    words = [column[0] for column in columns]
    words[differ[0]] = f"{{{','.join(columns[differ[0]])}}}"
    return ".".join(words)
