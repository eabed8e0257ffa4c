"""Embeddings: their scale, and their sum."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from calstack.compiler.fuse.match import attr, fused, initializer, new_node, only_use, scalar
from calstack.compiler.fuse.rule import Rule

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["EMBED", "EMBED_ADD", "EMBED_SCALE"]


def _check_embed(node: ir.Node) -> tuple[ir.Value, ir.Value] | str:
    weight, ids = node.inputs
    if not initializer(weight) or weight.shape is None or len(weight.shape) != 2 or attr(node, "axis", 0) != 0:
        return "does not gather rows of a 2-D weight"
    if not ids.is_graph_input():
        return "its ids are no graph input"
    return ids, weight


def _rewrite_embed(node: ir.Node, match: tuple[ir.Value, ir.Value]) -> None:
    new_node(node, "Embed", match, node.outputs, {"scale": 1.0})


@dataclasses.dataclass(frozen=True, slots=True)
class _Scaled:
    embed: ir.Node
    scale: float


def _check_scale(node: ir.Node) -> _Scaled | str:
    for value, factor in (node.inputs, reversed(node.inputs)):
        embed = fused(value, "Embed")
        if embed is None:
            continue
        scale = scalar(factor)
        if scale is None or not only_use(value):
            return "the embedding is not multiplied by one constant"
        return _Scaled(embed, scale)
    return "does not scale an embedding"


def _rewrite_scale(node: ir.Node, match: _Scaled) -> None:
    new_node(node, "Embed", match.embed.inputs, node.outputs, {"scale": match.scale})


@dataclasses.dataclass(frozen=True, slots=True)
class _Sum:
    into: ir.Value
    embed: ir.Node


def _check_add(node: ir.Node) -> _Sum | str:
    for into, value in (node.inputs, reversed(node.inputs)):
        embed = fused(value, "Embed")
        if embed is None or into is None or not (fused(into, "Embed") or fused(into, "EmbedAdd")):
            continue
        if not only_use(value) or not only_use(into):
            return "an embedding is read elsewhere too"
        return _Sum(into, embed)
    return "does not add embeddings"


def _rewrite_add(node: ir.Node, match: _Sum) -> None:
    new_node(node, "EmbedAdd", [match.into, *match.embed.inputs], node.outputs, {"scale": attr(match.embed, "scale", 1.0)})


EMBED = Rule("embed", "Gather", _check_embed, _rewrite_embed)
EMBED_SCALE = Rule("embed_scale", "Mul", _check_scale, _rewrite_scale)
EMBED_ADD = Rule("embed_add", "Add", _check_add, _rewrite_add)
