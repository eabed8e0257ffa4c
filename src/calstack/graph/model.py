"""What a frontend hands to the compiler: the graphs, and for every weight its float value and how the source stores it.

The graphs are the interface. The compiler derives programs by walking `prefill` / `decode`; it reads ModelSpec only for facts a
graph does not hold (limits, token ids).

Canonical form of a decoder graph (opset 24, standard operators, HF parameter names as initializer names; [] = where the spec says so):

    x = Gather(embed_tokens.weight, input_ids)            [* embed_scale, a constant]
    cos, sin = Cos/Sin(Cast(positions) * inv_freq)        one table per rope: shared by all layers, or one for layers with a
                                                          sliding window (inv_freq.local) and one for the others
    [mask = Less(Unsqueeze(positions, [1, 3]) - Range(0, Squeeze(Shape(kv.0.k)[2] + Shape(positions)[1]), 1), window)]
                                                          bool [batch, 1, q_len, past + q_len]; shared by all layers that slide
    per layer: h = Norm(x, input_layernorm.weight)
               q, k, v = MatMul(h, Transpose(*_proj.weight)) [+ Add(bias)]
               [q, k = Norm per head]; q, k = RotaryEmbedding(q, cos, sin; [rotary_embedding_dim])
               a, kv.N.k.out, kv.N.v.out = Attention(q, k, v, [mask], kv.N.k, kv.N.v; is_causal, scale, [softcap], heads)
               x = Add(x, y),  y = MatMul(a, Transpose(o_proj.weight)) [+ bias]
               h = Norm(x, post_attention_layernorm.weight)
               x = Add(x, y),  y = one of
                   MatMul(Mul(act(g), u), Transpose(down_proj.weight)),  g, u = MatMul(h, gate), MatMul(h, up)
                   calbin::MoE(h, mlp.gate.weight, mlp.experts.{gate,up,down}_proj.weight; top_k, renormalise)   (graph/moe.py)
    logits = MatMul(Norm(x, norm.weight), Transpose(lm_head.weight))   (tied: the embedding initializer itself)
             [= Mul(Tanh(Div(logits, cap)), cap)]

Norm is RMSNormalization(x, weight) or, for `rms_plus_one`, RMSNormalization(x, Add(weight, 1)). act(g) is Mul(g, Sigmoid(g)) or
Gelu(g; approximate). With `post_norms` each y passes a norm before it is added, and the MLP's norm has another name:

    x = Add(x, Norm(y, post_attention_layernorm.weight)); h = Norm(x, pre_feedforward_layernorm.weight)
    x = Add(x, Norm(y, post_feedforward_layernorm.weight))

Parameters that a source stores in another form (q, k, v or gate, up in one; each expert alone) come in the form above: rows of a
stored tensor lie as they were, so block bytes stay what they are. Expert weights are [experts, rows, inputs].

Inputs: input_ids [batch, q_len] i64, positions [batch, q_len] i64, past_kv_cur_seq_len [batch] i64 (semantic CSR),
kv.<layer>.k / .v [batch, kv_heads, past, head_dim]; optional embeds [batch, q_len, hidden] is reserved.

Canonical form of an encoder graph (role encode):

    x = LayerNormalization(word[input_ids] + type[token_type_ids] + position[positions], weight, bias)
    used = Less(Range(0, q_len, 1), Unsqueeze(cur_seq_len, [1]));  mask = used, expanded to [batch, 1, q_len, q_len]
    per layer: q, k, v = MatMul + bias of x;  a = Attention(q, k, v, mask; is_causal 0, scale, heads)
               x = LayerNormalization(Add(x, MatMul(a, attention.output.dense) + bias), weight, bias)
               x = LayerNormalization(Add(x, MatMul(Gelu(MatMul(x, intermediate.dense) + bias), output.dense) + bias), weight, bias)
    hidden = x [batch, q_len, hidden] (rows from cur_seq_len on mean nothing)
    [embedding = ReduceSum(x * used) / cur_seq_len, or Gather(x, 0, axis 1);  [LpNormalization(embedding; p 2)]]      [batch, hidden]
    [scores = MatMul(Tanh(MatMul(Gather(x, 0, axis 1), pooler.dense) + bias), classifier) + bias]                    [batch, labels]

Inputs: input_ids, positions, token_type_ids [batch, q_len] i64, cur_seq_len [batch] i64.
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
