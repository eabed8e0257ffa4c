"""The pass contract: what a pass requires of the graph, what it does, what it ensures. Every pass changes the graph in place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["GraphPass", "PassError", "run_passes"]


class PassError(AssertionError):
    """A pass broke its own contract: our bug, never the model's."""


class GraphPass(Protocol):
    """One step over one graph. `requires` and `ensures` raise PassError or a CalstackError naming the node."""

    @property
    def name(self) -> str:
        """Shown in reports and in errors."""
        ...

    def requires(self, graph: ir.Graph) -> None:
        """What must hold before `call`."""
        ...

    def call(self, graph: ir.Graph) -> tuple[ir.Graph, bool]:
        """The same graph object, changed in place, and whether anything changed."""
        ...

    def ensures(self, graph: ir.Graph) -> None:
        """What holds after `call`."""
        ...


def run_passes(graph: ir.Graph, passes: Iterable[GraphPass]) -> tuple[str, ...]:
    """Run passes in order; names of those that changed something."""
    changed = []
    for step in passes:
        step.requires(graph)
        result, modified = step.call(graph)
        if result is not graph:
            raise PassError(f"{step.name} works in place but returned another graph: return the same object")
        step.ensures(graph)
        if modified:
            changed.append(step.name)
    return tuple(changed)
