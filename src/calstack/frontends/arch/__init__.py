"""Architectures: one module per HF model type, found by that name in the one table below."""

from __future__ import annotations

from typing import TYPE_CHECKING

from calstack.errors import UnsupportedError
from calstack.frontends.arch import llama, qwen3
from calstack.frontends.arch.family import Family

if TYPE_CHECKING:
    import onnx_ir as ir

    from calstack.specs import ModelSpec

__all__ = ["FAMILIES", "build_graphs", "family_of"]

FAMILIES: dict[str, Family] = {module.FAMILY.model_type: module.FAMILY for module in (llama, qwen3)}


def family_of(model_type: str, where: str) -> Family:
    """The family of an HF model type (GGUF uses the same names), or UnsupportedError."""
    if model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UnsupportedError(f"the architecture {model_type[:64]!r} is not supported", where=where, remedy=f"supported: {known}")
    return FAMILIES[model_type]


def build_graphs(spec: ModelSpec) -> tuple[ir.Model, ir.Model]:
    """The prefill graph (any q_len) and the decode graph (q_len 1) of a spec, weights without data."""
    from calstack.frontends.arch.trace import trace  # onnxscript takes half a second to import

    family_of(spec.arch, spec.name).check(spec, spec.name)
    return trace(spec, name="prefill", q_len="q_len"), trace(spec, name="decode", q_len=1)
