// Sizes and places inside a layer of a KV block (layout kv64.v1, see calstack/kernels.h). Internal linkage: see kernel_parts.h.
#pragma once
#include "calstack/kernels.h"

namespace calstack {

[[maybe_unused]] static inline bool k_scaled(KVType t) { return t == KVType::i8; }
[[maybe_unused]] static inline bool v_scaled(KVType t) { return t == KVType::i8 || t == KVType::bf16_v8; }
[[maybe_unused]] static inline size_t k_bytes(KVType t) { return t == KVType::f32 ? 4 : t == KVType::i8 ? 1 : 2; }
[[maybe_unused]] static inline size_t v_bytes(KVType t) { return t == KVType::f32 ? 4 : t == KVType::bf16 ? 2 : 1; }

struct KVPlaces {
  size_t plane, kb, vb, heads;
  bool ks, vs;

  KVPlaces(KVType t, int kv_heads, int head_dim)
      : plane((size_t)kBlockPositions * (size_t)head_dim), kb(k_bytes(t)), vb(v_bytes(t)), heads((size_t)kv_heads), ks(k_scaled(t)), vs(v_scaled(t)) {}
  size_t k(size_t head) const { return head * plane * kb; }
  size_t v(size_t head) const { return (heads * kb + head * vb) * plane; }
  // 64 f32, one per position.
  size_t k_scale(size_t head) const { return v(heads) + head * kBlockPositions * sizeof(float); }
  size_t v_scale(size_t head) const { return k_scale((ks ? heads : 0) + head); }
  size_t bytes() const { return v_scale(vs ? heads : 0); }
};

}  // namespace calstack
