"""The fused operators that stand in the graph between fusion and lowering, all in one domain.

Embed(index, weight) -> x                              {scale}: index is input_ids, token_type_ids or positions
EmbedAdd(x, index, weight) -> x                        {scale}, in place
RopeTable(positions, inv_freq) -> cos, sin             {attention_factor}
Linear(x, weight, [bias]) -> y
Stack(h, w…, [b…]) -> y                                {weights, activation}: q, k, v one above the other, or gate and up
NormLinear(x, norm, w…, [b…]) -> y                     {weights, activation, eps, plus_one}: a Stack with the norm before it
QkNormRopeKv(qkv, cos, sin, [q_norm, k_norm]) -> qkv   {heads, kv_heads, head_dim, rope_dim, eps, plus_one}, in place
Attention(qkv, past_k, past_v) -> y, k, v              {heads, kv_heads, head_dim, scale, softcap, window}
Residual(residual, x, weight, [bias]) -> residual      in place
LinearAct(x, weight, [bias]) -> y                      {activation}
NormAdd(residual, x, norm) -> residual                 {eps, plus_one}, in place
LayerNorm(x, norm, bias) -> y                          {eps}
StackLinear(x, w…, [b…]) -> y                          {weights}: a Stack without a norm
EncoderAttention(qkv) -> y                             {heads, kv_heads, head_dim, scale}
Pool(x) -> embedding                                   {how, normalise}
Classify(x, w, [b], head, [b]) -> scores               {bias, head_bias}: which are there
LmHead(x, norm, weight, [bias]) -> logits              {eps, plus_one, softcap}
"""

from __future__ import annotations

__all__ = ["DOMAIN"]

DOMAIN = "calstack"
