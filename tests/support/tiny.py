"""The tiny models of tests/data, opened and compiled."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calstack.compiler.options import CompileOptions
from calstack.compiler.pipeline import Plan, plan_bundle
from calstack.frontends import open_source

if TYPE_CHECKING:
    from calstack.graph.model import GraphBundle

DATA = Path(__file__).parents[1] / "data"
TINY = ("tiny-llama", "tiny-qwen3")


@functools.cache
def bundle(name: str) -> GraphBundle:
    """A tiny model; its graphs are shared, so change only copies."""
    return open_source(DATA / name)


def plan(name: str, **options: Any) -> Plan:
    """A tiny model compiled up to its weights."""
    return plan_bundle(bundle(name), CompileOptions(**options))
