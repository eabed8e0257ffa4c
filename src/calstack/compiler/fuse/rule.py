"""A fusion rule is pattern (the anchor operator), check and rewrite; check says why it did not match."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["Fuse", "Miss", "RemoveDead", "Rule"]

M = TypeVar("M")


@dataclasses.dataclass(frozen=True, slots=True)
class Miss:
    """Why a rule did not match at a node."""

    rule: str
    node: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Rule(Generic[M]):
    """Applied at every node of operator `anchor`: `check` gives a match or the reason for none, `rewrite` acts on it."""

    name: str
    anchor: str
    check: Callable[[ir.Node], M | str]
    rewrite: Callable[[ir.Node, M], None]
    domain: str = ""


class Fuse:
    """One rule as a pass; `misses` keeps the reasons of the last call for the report."""

    def __init__(self, rule: Rule[Any]) -> None:
        self.rule, self.misses = rule, list[Miss]()

    @property
    def name(self) -> str:
        return f"fuse/{self.rule.name}"

    def requires(self, graph: ir.Graph) -> None:
        """Nothing: a rule that does not match leaves the graph as it is."""

    def call(self, graph: ir.Graph) -> tuple[ir.Graph, bool]:
        self.misses.clear()
        modified = False
        for node in list(graph):
            if node.op_type != self.rule.anchor or node.domain != self.rule.domain:
                continue
            match = self.rule.check(node)
            if isinstance(match, str):
                self.misses.append(Miss(self.rule.name, node.name or node.op_type, match))
            else:
                self.rule.rewrite(node, match)
                modified = True
        return graph, modified

    def ensures(self, graph: ir.Graph) -> None:
        """Nothing beyond the rewrite itself; RemoveDead clears what is no longer read."""


class RemoveDead:
    """Removes nodes whose outputs nobody reads."""

    name = "remove_dead"

    def requires(self, graph: ir.Graph) -> None:
        """Nothing."""

    def call(self, graph: ir.Graph) -> tuple[ir.Graph, bool]:
        dead = 0
        for node in reversed(list(graph)):
            if not any(value.uses() or value.is_graph_output() for value in node.outputs):
                graph.remove(node, safe=True)
                dead += 1
        return graph, dead > 0

    def ensures(self, graph: ir.Graph) -> None:
        """Nothing: removal is complete by construction, nodes are visited in reverse order."""
