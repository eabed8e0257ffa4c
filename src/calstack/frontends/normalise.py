"""From the tensors a source holds to one tensor per parameter of the canonical graph: renamed, split by rows, experts stacked."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calstack.frontends.mapped import MappedTensor
from calstack.frontends.reading import bad

if TYPE_CHECKING:
    import numpy.typing as npt

    from calstack.frontends.arch.family import Family
    from calstack.graph.model import StoredTensor
    from calstack.specs import ModelSpec

__all__ = ["StackedTensor", "normalise"]

_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d{1,4})\.(gate_proj|up_proj|down_proj)\.weight")
_ALL_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")


@dataclasses.dataclass(frozen=True, slots=True)
class StackedTensor:
    """A StoredTensor [parts, rows, k] of tensors [rows, k] of one kind."""

    name: str
    parts: tuple[MappedTensor, ...]

    @property
    def kind(self) -> str:
        """The storage kind of all parts."""
        return self.parts[0].kind

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of parts, then the shape of one."""
        return (len(self.parts), *self.parts[0].shape)

    def stored(self) -> npt.NDArray[np.uint8]:
        """[rows of all parts, bytes per row]."""
        return np.concatenate([part.stored() for part in self.parts])

    def float32(self) -> npt.NDArray[np.float32]:
        """The dequantised value, a new array of `shape`."""
        return np.stack([part.float32() for part in self.parts])


def normalise(tensors: Mapping[str, MappedTensor], spec: ModelSpec, family: Family, path: Path) -> dict[str, StoredTensor]:
    """Tensors by canonical parameter name, in the source's order.

    Raises SourceError when rows to split or experts to stack are not what the spec promises.
    """
    plain: dict[str, StoredTensor] = {}
    experts: dict[tuple[str, str], dict[int, MappedTensor]] = defaultdict(dict)
    for source, tensor in tensors.items():
        name = _renamed(source, family)
        if match := _EXPERT.fullmatch(name):
            experts[match[1], match[3]][int(match[2])] = tensor
        elif match := _ALL_EXPERTS.fullmatch(name):
            plain |= _split_experts(match[1], match[2], tensor, path)
        else:
            plain |= _split_rows(name, tensor, spec, family, path)
    for (stem, part), found in experts.items():
        plain[f"{stem}.{part}.weight"] = _stacked(f"{stem}.{part}.weight", found, spec, path)
    return plain


def _renamed(name: str, family: Family) -> str:
    for old, new in family.renames:
        name = name.replace(old, new)
    return name


def _split_rows(name: str, tensor: MappedTensor, spec: ModelSpec, family: Family, path: Path) -> dict[str, StoredTensor]:
    stem, _, kind = name.rpartition(".")
    whole = next((fused for fused in family.fused if stem.endswith("." + fused)), None)
    if whole is None:
        return {name: dataclasses.replace(tensor, name=name)}
    prefix = stem.removesuffix(whole)
    rows = [_rows(part, spec) for part in family.fused[whole]]
    if sum(rows) != tensor.shape[0]:
        bad(path, f"tensor {tensor.name!r}", f"{tensor.shape[0]} rows, expected {sum(rows)}")
    starts = np.cumsum([0, *rows]).tolist()
    names = [f"{prefix}{part}.{kind}" for part in family.fused[whole]]
    return {part: tensor.rows(part, start, count) for part, start, count in zip(names, starts, rows, strict=False)}


def _rows(part: str, spec: ModelSpec) -> int:
    heads = {"self_attn.q_proj": spec.heads, "self_attn.k_proj": spec.kv_heads, "self_attn.v_proj": spec.kv_heads}
    return heads[part] * spec.head_dim if part in heads else spec.intermediate


def _split_experts(stem: str, part: str, tensor: MappedTensor, path: Path) -> dict[str, StoredTensor]:
    """[experts, rows, k] with gate and up one above the other in each expert."""
    if len(tensor.shape) != 3 or (part == "gate_up_proj" and tensor.shape[1] % 2):
        bad(path, f"tensor {tensor.name!r}", f"the shape {list(tensor.shape)} is not [experts, rows, inputs]")
    if part == "down_proj":
        return {f"{stem}.down_proj.weight": dataclasses.replace(tensor, name=f"{stem}.down_proj.weight")}
    experts, rows, k = tensor.shape
    flat = dataclasses.replace(tensor, shape=(experts * rows, k))
    halves = {}
    for half, which in enumerate(("gate_proj", "up_proj")):
        name = f"{stem}.{which}.weight"
        parts = (flat.rows(name, expert * rows + half * (rows // 2), rows // 2) for expert in range(experts))
        halves[name] = StackedTensor(name, tuple(parts))
    return dict(halves)


def _stacked(name: str, found: Mapping[int, MappedTensor], spec: ModelSpec, path: Path) -> StackedTensor:
    experts = spec.moe.experts if spec.moe is not None else 0
    if sorted(found) != list(range(experts)):
        bad(path, f"tensor {name!r}", f"{experts} experts are promised, the weights hold {len(found)}")
    parts = tuple(found[index] for index in range(experts))
    if len({(part.kind, part.shape) for part in parts}) != 1:
        bad(path, f"tensor {name!r}", "its experts differ in shape or element type")
    return StackedTensor(name, parts)
