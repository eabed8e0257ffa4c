// Scalar reference of attention, attention_split and attention_merge.
#include <algorithm>
#include <vector>

#include "../kernel_parts.h"
#include "../kv_layout.h"
#include "ref_math.h"

namespace calstack::reference {
namespace {

// One KV head of one layer, read position by position.
struct Cache {
  const KVView& kv;
  const int32_t* table;
  size_t head;

  const uint8_t* layer(size_t position) const {
    return kv.base + static_cast<size_t>(table[position / kBlockPositions]) * kv.block_bytes + kv.layer_offset;
  }
  static float read(const uint8_t* plane, size_t element, size_t bytes) {
    if (bytes == 1) return static_cast<float>(reinterpret_cast<const int8_t*>(plane)[element]);
    if (bytes == 2) {
      uint16_t h;
      std::memcpy(&h, plane + element * 2, 2);
      return bf16_to_float(h);
    }
    float f;
    std::memcpy(&f, plane + element * 4, 4);
    return f;
  }
  KVPlaces places() const { return KVPlaces(kv.type, kv.kv_heads, kv.head_dim); }
  // Stored values, without the scale.
  float k(size_t position, size_t d) const {
    const size_t j = position % kBlockPositions, element = pairs() ? (d / 2 * kBlockPositions + j) * 2 + d % 2 : d * kBlockPositions + j;
    return read(layer(position) + places().k(head), element, k_bytes(kv.type));
  }
  float v(size_t position, size_t d) const {
    const size_t dim = static_cast<size_t>(kv.head_dim), j = position % kBlockPositions;
    return read(layer(position) + places().v(head), pairs() ? (j / 2 * dim + d) * 2 + j % 2 : j * dim + d, v_bytes(kv.type));
  }
  bool pairs() const { return kv.type != KVType::f32; }
  // What a left factor becomes.
  float left(float x) const { return pairs() ? round_bf16(x) : x; }
  // The k-th index of a chain: pairs have their odd one first.
  int in_order(int k) const { return pairs() ? k ^ 1 : k; }
  float k_scale(size_t position) const { return read(layer(position) + places().k_scale(head), position % kBlockPositions, 4); }
  float v_scale(size_t position) const { return read(layer(position) + places().v_scale(head), position % kBlockPositions, 4); }
};

struct Partial {
  float m = kMinusInf, l = 0.0f;
  std::vector<float> o;
};

float score(const float* q, const AttnShape& s, const Cache& cache, int position) {
  float acc = 0.0f;
  for (int i = 0; i < s.head_dim; ++i) {
    const int d = cache.in_order(i);
    acc = std::fma(cache.left(q[d] * s.scale), cache.k(static_cast<size_t>(position), static_cast<size_t>(d)), acc);
  }
  if (k_scaled(cache.kv.type)) acc = acc * cache.k_scale(static_cast<size_t>(position));
  return s.softcap != 0.0f ? soft_cap(acc, s.softcap) : acc;
}

int first_seen(const AttnShape& s, int position) { return s.window > 0 ? std::max(0, position - s.window + 1) : 0; }

Partial split_partial(const float* q, const AttnShape& s, const Cache& cache, int position, int split) {
  Partial part;
  part.o.assign(static_cast<size_t>(s.head_dim), 0.0f);
  const int begin = std::max(split * kSplitKeys, first_seen(s, position)), end = std::min((split + 1) * kSplitKeys, position + 1);
  float p[kSplitKeys], lanes[16] = {};  // p: scores first
  for (int key = begin; key < end; ++key) {
    p[key % kSplitKeys] = score(q, s, cache, key);
    part.m = std::max(part.m, p[key % kSplitKeys]);
  }
  for (int key = begin; key < end; ++key) {
    float& v = p[key % kSplitKeys];
    v = exp_f32(v - part.m);
    lanes[key % 16] += v;
    v = cache.left(v_scaled(cache.kv.type) ? v * cache.v_scale(static_cast<size_t>(key)) : v);
  }
  for (int i = split * kSplitKeys; i < (split + 1) * kSplitKeys; ++i) {
    const int key = cache.in_order(i);
    if (key < begin || key >= end) continue;
    for (int d = 0; d < s.head_dim; ++d) {
      float& o = part.o[static_cast<size_t>(d)];
      o = std::fma(p[key % kSplitKeys], cache.v(static_cast<size_t>(key), static_cast<size_t>(d)), o);
    }
  }
  part.l = lane_tree(lanes);
  return part;
}

void merge(Partial& a, float m2, float l2, const float* o2) {
  if (m2 == kMinusInf) return;
  if (a.m == kMinusInf) {
    a.m = m2, a.l = l2;
    std::copy(o2, o2 + a.o.size(), a.o.begin());
    return;
  }
  const float m = std::max(a.m, m2), wa = exp_f32(a.m - m), wb = exp_f32(m2 - m);
  a.l = std::fma(l2, wb, a.l * wa);
  for (size_t d = 0; d < a.o.size(); ++d) a.o[d] = std::fma(o2[d], wb, a.o[d] * wa);
  a.m = m;
}

void finish(const Partial& part, float* out) {
  for (size_t d = 0; d < part.o.size(); ++d) out[d] = part.o[d] / part.l;
}

void attention(const float* qkv, size_t xs, const AttnShape& s, const KVView& kv, int lane, const int32_t* positions, int kv_head, int r0, int r1,
               float* out, size_t os, void*) {
  const Cache cache{kv, kv.tables[lane], static_cast<size_t>(kv_head)};
  const int group = s.heads / s.kv_heads;
  for (int r = r0; r < r1; ++r)
    for (int h = kv_head * group; h < (kv_head + 1) * group; ++h) {
      const float* q = qkv + static_cast<size_t>(r) * xs + static_cast<size_t>(h) * s.head_dim;
      Partial sum;
      sum.o.assign(static_cast<size_t>(s.head_dim), 0.0f);
      for (int split = 0; split <= positions[r] / kSplitKeys; ++split) {
        const Partial part = split_partial(q, s, cache, positions[r], split);
        merge(sum, part.m, part.l, part.o.data());
      }
      finish(sum, out + static_cast<size_t>(r) * os + static_cast<size_t>(h) * s.head_dim);
    }
}

void attention_split(const float* qkv, size_t xs, const AttnShape& s, const KVView& kv, int lane, int position, int h0, int h1, int row, int split,
                     float* ml, float* o, void*) {
  const int group = s.heads / s.kv_heads;
  for (int h = h0 * group; h < h1 * group; ++h) {
    const Cache cache{kv, kv.tables[lane], static_cast<size_t>(h / group)};
    const Partial part = split_partial(qkv + static_cast<size_t>(row) * xs + static_cast<size_t>(h) * s.head_dim, s, cache, position, split);
    ml[h] = part.m;
    ml[s.heads + h] = part.l;
    std::copy(part.o.begin(), part.o.end(), o + static_cast<size_t>(h) * s.head_dim);
  }
}

void attention_merge(const AttnShape& s, const float* ml, const float* o, int splits, int h0, int h1, float* out) {
  for (int h = h0; h < h1; ++h) {
    Partial sum;
    sum.o.assign(static_cast<size_t>(s.head_dim), 0.0f);
    for (int split = 0; split < splits; ++split) {
      const float* m = ml + static_cast<size_t>(split) * 2 * s.heads + h;
      merge(sum, m[0], m[s.heads], o + (static_cast<size_t>(split) * s.heads + h) * s.head_dim);
    }
    finish(sum, out + static_cast<size_t>(h) * s.head_dim);
  }
}

}  // namespace

void fill_attention(KernelTable& t) {
  t.attention = attention;
  t.attention_split = attention_split;
  t.attention_merge = attention_merge;
}

}  // namespace calstack::reference
