"""Architectures: one module per HF model type, found by that name in the one table below."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from calstack.errors import UnsupportedError
from calstack.frontends.arch import bert, gemma3, llama, mistral, mixtral, phi3, qwen2, qwen3, qwen3_moe
from calstack.frontends.arch.family import Family
from calstack.specs import Role

if TYPE_CHECKING:
    import onnx_ir as ir

    from calstack.specs import ModelSpec

__all__ = ["FAMILIES", "build_graphs", "family_of", "family_of_gguf"]

_MODULES = (llama, mistral, qwen2, qwen3, phi3, gemma3, qwen3_moe, mixtral, bert)
FAMILIES: Mapping[str, Family] = MappingProxyType({module.FAMILY.model_type: module.FAMILY for module in _MODULES})


def family_of(model_type: str, where: str) -> Family:
    """The family of an HF model type, or UnsupportedError."""
    if model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UnsupportedError(f"the architecture {model_type[:64]!r} is not supported", where=where, remedy=f"supported: {known}")
    return FAMILIES[model_type]


def family_of_gguf(arch: str, where: str, *, experts: bool) -> Family:
    """The family that GGUF calls `arch`, with or without experts, or UnsupportedError. The first in the table wins."""
    for family in FAMILIES.values():
        if (family.in_gguf, family.moe) == (arch, experts):
            return family
    known = ", ".join(sorted({family.in_gguf for family in FAMILIES.values()}))
    shown = f"{arch[:64]!r} with experts" if experts else f"{arch[:64]!r}"
    raise UnsupportedError(f"the architecture {shown} is not supported", where=where, remedy=f"supported: {known}")


def build_graphs(spec: ModelSpec) -> dict[Role, ir.Model]:
    """A decoder's prefill graph (any q_len) and decode graph (q_len 1), or an encoder's one, weights without data."""
    from calstack.frontends.arch.trace import trace, trace_encoder  # onnxscript takes half a second to import

    family_of(spec.arch, spec.name).check(spec, spec.name)
    if spec.encoder is not None:
        return {Role.ENCODE: trace_encoder(spec, spec.encoder)}
    return {Role.PREFILL: trace(spec, name="prefill", q_len="q_len"), Role.DECODE: trace(spec, name="decode", q_len=1)}
