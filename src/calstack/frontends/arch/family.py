"""What an architecture adds to the shared graphs, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from calstack.errors import UnsupportedError
from calstack.specs import Activation, ModelSpec, NormKind

if TYPE_CHECKING:
    from calstack.frontends.metadata import Metadata

__all__ = ["DECODER_GGUF", "Family", "Fields"]

Fields = dict[str, Any]  # of a ModelSpec

_EMPTY: Mapping[str, Any] = MappingProxyType({})


def _nothing(_: Metadata) -> Fields:
    return {}


# GGUF names of a decoder layer's tensors, the same for every decoder but for those that a family adds or changes.
DECODER_GGUF: Mapping[str, str] = MappingProxyType(
    {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "output": "lm_head",
        "blk.*.attn_norm": "model.layers.*.input_layernorm",
        "blk.*.attn_q": "model.layers.*.self_attn.q_proj",
        "blk.*.attn_k": "model.layers.*.self_attn.k_proj",
        "blk.*.attn_v": "model.layers.*.self_attn.v_proj",
        "blk.*.attn_output": "model.layers.*.self_attn.o_proj",
        "blk.*.attn_q_norm": "model.layers.*.self_attn.q_norm",
        "blk.*.attn_k_norm": "model.layers.*.self_attn.k_norm",
        "blk.*.ffn_norm": "model.layers.*.post_attention_layernorm",
        "blk.*.ffn_gate": "model.layers.*.mlp.gate_proj",
        "blk.*.ffn_up": "model.layers.*.mlp.up_proj",
        "blk.*.ffn_down": "model.layers.*.mlp.down_proj",
        "blk.*.ffn_gate_inp": "model.layers.*.mlp.gate",
        "blk.*.ffn_gate_exps": "model.layers.*.mlp.experts.gate_proj",
        "blk.*.ffn_up_exps": "model.layers.*.mlp.experts.up_proj",
        "blk.*.ffn_down_exps": "model.layers.*.mlp.experts.down_proj",
    }
)


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """One HF model type. What is not named here is as in `llama`.

    `config` and `gguf` read the ModelSpec fields that only this family has, from config.json or GGUF metadata; `defaults` are config
    keys whose absence means something else than usual. `renames` are parts of HF parameter names with their canonical form, `fused`
    parameters that hold several canonical ones one above the other.
    """

    model_type: str
    gguf_arch: str = ""  # general.architecture in GGUF, "" when it is the model type
    gguf_names: Mapping[str, str] = dataclasses.field(default_factory=lambda: DECODER_GGUF)  # GGUF stem -> HF stem, `*` is the layer
    gguf_interleaved_qk: bool = False  # GGUF stores rotated pairs of q and k rows side by side
    qk_norm: bool = False
    biases: frozenset[str] = frozenset()  # ModelSpec bias fields that may be set
    rope_scalings: frozenset[str] = frozenset({"none", "linear", "llama3", "yarn"})
    norms: frozenset[NormKind] = frozenset({NormKind.RMS})
    activations: frozenset[Activation] = frozenset({Activation.SILU})
    sliding: bool = False  # may have a sliding window
    post_norms: bool = False
    softcaps: bool = False
    moe: bool = False
    encoder: bool = False
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=lambda: _EMPTY)
    config: Callable[[Metadata], Fields] = _nothing
    gguf: Callable[[Metadata], Fields] = _nothing
    renames: tuple[tuple[str, str], ...] = ()
    optional: tuple[str, ...] = ()  # beginnings of parameter names that a source may hold though no graph needs them
    fused: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=lambda: _EMPTY)

    @property
    def in_gguf(self) -> str:
        """What GGUF calls it."""
        return self.gguf_arch or self.model_type

    def check(self, spec: ModelSpec, where: str) -> None:
        """Raise UnsupportedError naming the first field of `spec` that this family's graphs do not express."""
        plain = {
            "norm": spec.norm in self.norms,
            "activation": spec.activation in self.activations,
            "qk_norm": spec.qk_norm == self.qk_norm,
            "sliding_window": self.sliding or (spec.sliding_window == 0 and spec.local_rope is None),
            "softcap": self.softcaps or (spec.logit_softcap == 0.0 and spec.attn_softcap == 0.0),
            "post_norms": spec.post_norms == self.post_norms,
            "moe": (spec.moe is not None) == self.moe,
            "encoder": (spec.encoder is not None) == self.encoder,
            "rope.scaling": {spec.rope.scaling, spec.local_rope.scaling if spec.local_rope else "none"} <= self.rope_scalings,
        }
        plain |= {name: name in self.biases or not getattr(spec, name) for name in ("qkv_bias", "o_bias", "mlp_bias")}
        for field, good in plain.items():
            if not good:
                raise UnsupportedError(
                    f"{self.model_type} with this {field} is not supported",
                    where=where,
                    remedy="use a model without it, or follow the release notes for support",
                )
