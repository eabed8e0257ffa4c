"""Which layers of a config.json attend through a sliding window, and with which rope."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from calstack.errors import UnsupportedError
from calstack.frontends import limits
from calstack.frontends.reading import bad
from calstack.specs import RopeSpec

if TYPE_CHECKING:
    from calstack.frontends.metadata import Metadata

__all__ = ["window_fields"]

_FULL, _SLIDING = "full_attention", "sliding_attention"


def window_fields(config: Metadata, layers: int, context: int, head_dim: int) -> dict[str, Any]:
    """`sliding_window`, `full_attention_every` and `local_rope` of a ModelSpec; nothing where no layer slides.

    Raises UnsupportedError when the sliding layers follow no regular pattern.
    """
    if "sliding_window" not in config or not config.flag("use_sliding_window", True):
        return {}
    window = config.integer("sliding_window", 1, limits.MAX_CONTEXT)
    kinds = _kinds(config, layers)
    local = _local_rope(config, head_dim)
    if _SLIDING not in kinds or (window >= context and local is None):
        return {}
    return {"sliding_window": window, "full_attention_every": _every(config, kinds), "local_rope": local}


def _kinds(config: Metadata, layers: int) -> list[str]:
    """The kind of every layer."""
    if "layer_types" in config:
        kinds = config.texts("layer_types")
        if len(kinds) != layers or not set(kinds) <= {_FULL, _SLIDING}:
            bad(config.path, f"{config.prefix}layer_types", f"not {layers} times {_FULL} or {_SLIDING}")
        return kinds
    if "sliding_window_pattern" in config:
        every = config.integer("sliding_window_pattern", 1, limits.MAX_LAYERS)
        return [_SLIDING if (layer + 1) % every else _FULL for layer in range(layers)]
    first = config.integer("max_window_layers", 0, limits.MAX_LAYERS, 0)
    return [_SLIDING if layer >= first else _FULL for layer in range(layers)]


def _every(config: Metadata, kinds: list[str]) -> int:
    """The n for which every nth layer is full; 0 when none is."""
    if _FULL not in kinds:
        return 0
    every = kinds.index(_FULL) + 1
    if every == 1 or kinds != [_SLIDING if (layer + 1) % every else _FULL for layer in range(len(kinds))]:
        raise UnsupportedError(
            "sliding and full layers that follow no regular pattern are not supported", where=f"{config.path}: {config.prefix}layer_types"
        )
    return every


def _local_rope(config: Metadata, head_dim: int) -> RopeSpec | None:
    rope = config.section("rope_parameters")
    if _SLIDING in rope:
        local = rope.section(_SLIDING)
        if local.text("rope_type", "default") != "default":
            raise UnsupportedError("a scaled rope in sliding layers is not supported", where=f"{config.path}: {local.prefix}rope_type")
        return RopeSpec(theta=local.number("rope_theta", 1.0, 1e12, 10000.0), dim=head_dim)
    if "rope_local_base_freq" in config and not rope.values:
        return RopeSpec(theta=config.number("rope_local_base_freq", 1.0, 1e12), dim=head_dim)
    return None
