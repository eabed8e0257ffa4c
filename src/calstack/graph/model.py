"""What a frontend hands to the compiler: the graphs, and for every weight its float value and how the source stores it.

The graphs are the interface. The compiler derives programs by walking `prefill` / `decode`; it reads ModelSpec only for facts a
graph does not hold (limits, token ids).

Canonical form of a decoder graph (opset 24, standard operators, HF parameter names as initializer names):

    x = Gather(embed_tokens.weight, input_ids)            [* embed_scale]
    cos, sin = Cos/Sin(Cast(positions) * inv_freq)        shared by all layers that share a rope
    per layer: h = RMSNormalization(x, input_layernorm.weight)
               q, k, v = MatMul(h, Transpose(*_proj.weight)) [+ Add(bias)]
               [q, k = RMSNormalization per head]; q, k = RotaryEmbedding(q, cos, sin)
               a, kv.N.k.out, kv.N.v.out = Attention(q, k, v, , kv.N.k, kv.N.v; is_causal, scale, softcap, heads)
               x = Add(x, MatMul(a, Transpose(o_proj.weight)))
               h = RMSNormalization(x, post_attention_layernorm.weight)
               g, u = MatMul(h, gate), MatMul(h, up); x = Add(x, MatMul(Mul(Mul(g, Sigmoid(g)), u), down))
    logits = MatMul(RMSNormalization(x, norm.weight), Transpose(lm_head.weight))   (tied: the embedding initializer itself)

Inputs: input_ids [batch, q_len] i64, positions [batch, q_len] i64, past_kv_cur_seq_len [batch] i64 (semantic CSR),
kv.<layer>.k / .v [batch, kv_heads, past, head_dim]; optional embeds [batch, q_len, hidden] is reserved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from calstack.calbin.manifest import SourceInfo
from calstack.errors import UnsupportedError
from calstack.specs import ModelSpec, Role

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import onnx_ir as ir

__all__ = ["GraphBundle", "StoredTensor"]


class StoredTensor(Protocol):
    """A weight as its source stores it. Reading is lazy; nothing is cached by the object itself."""

    @property
    def name(self) -> str:
        """Initializer name in the graphs (HF parameter name)."""
        ...

    @property
    def kind(self) -> str:
        """Storage type, a key of `blocks.KINDS`; of block kinds Q8_0, Q4_0, Q4_1 are imported bit for bit, others by value."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape, HF orientation ([out, in] for linear weights)."""
        ...

    def stored(self) -> npt.NDArray[np.uint8]:
        """The stored bytes in row order of `shape` (rows already permuted to HF orientation): [rows, bytes per row]."""
        ...

    def float32(self) -> npt.NDArray[np.float32]:
        """The dequantised value: a new array of `shape`."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class GraphBundle:
    """Everything the compiler needs of a model."""

    spec: ModelSpec
    graphs: Mapping[Role, ir.Model]  # prefill and decode, or encode
    tensors: Mapping[str, StoredTensor]  # by initializer name
    tokenizer_json: bytes
    chat_template: str  # "" when the source has none
    generation: Mapping[str, object]  # generation defaults: eos ids, temperature, …
    source: SourceInfo

    @property
    def prefill(self) -> ir.Model:
        """The prefill graph, or UnsupportedError for an encoder."""
        return self._graph(Role.PREFILL)

    @property
    def decode(self) -> ir.Model:
        """The decode graph, or UnsupportedError for an encoder."""
        return self._graph(Role.DECODE)

    def _graph(self, role: Role) -> ir.Model:
        if role not in self.graphs:
            held = ", ".join(self.graphs)
            raise UnsupportedError(f"{self.spec.arch} has no {role} graph, only {held}", where=self.spec.name, remedy="give a decoder")
        return self.graphs[role]
