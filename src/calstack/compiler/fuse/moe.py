"""A mixture of experts with the norm before it and the residual behind it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from calstack.calbin.packing import LANES
from calstack.compiler.fuse.match import attr, fused, initializer, new_node, norm_of, only_use
from calstack.compiler.fuse.rule import Rule

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["MOE", "MOE_RESIDUAL"]


def _check(node: ir.Node) -> tuple[ir.Value, ir.Value, float, bool] | str:
    weights = node.inputs[1:]
    if len(weights) != 4 or not all(initializer(value) for value in weights):
        return "router, gate, up and down are not all weights"
    gate, down = weights[1], weights[3]
    if gate.shape is None or down.shape is None or int(gate.shape[1]) % LANES or int(down.shape[1]) % LANES:
        return f"an expert's widths are not whole blocks of {LANES}"
    return norm_of(node.inputs[0])


def _rewrite(node: ir.Node, match: tuple[ir.Value, ir.Value, float, bool]) -> None:
    x, norm, eps, plus_one = match
    attributes = {name: attr(node, name, 0) for name in ("top_k", "renormalise")} | {"eps": eps, "plus_one": int(plus_one)}
    new_node(node, "Moe", [x, norm, *node.inputs[1:]], node.outputs, attributes)


@dataclasses.dataclass(frozen=True, slots=True)
class _Stream:
    residual: ir.Value
    moe: ir.Node


def _check_residual(node: ir.Node) -> _Stream | str:
    for residual, value in (node.inputs, reversed(node.inputs)):
        moe = fused(value, "Moe")
        if moe is None or residual is None or initializer(residual):
            continue
        if not only_use(value):
            return "what the experts give is read elsewhere too"
        return _Stream(residual, moe)
    return "does not add experts' outputs to a residual"


def _rewrite_residual(node: ir.Node, match: _Stream) -> None:
    attributes = {name: attr(match.moe, name, 0) for name in ("top_k", "renormalise", "eps", "plus_one")}
    new_node(node, "MoeResidual", [match.residual, *match.moe.inputs], node.outputs, attributes)


MOE = Rule("moe", "MoE", _check, _rewrite, "calbin")
MOE_RESIDUAL = Rule("moe_residual", "Add", _check_residual, _rewrite_residual)
