// Attention over the paged cache. Query vectors (query head x row) are taken in batches that share one pass over their keys, split by split;
// splits are merged in ascending order.
#include "attention_split.h"
#include "kernel_parts.h"

namespace calstack {
namespace CALSTACK_ISA {
namespace {

AttentionScratch& aligned(void* scratch) {
  const uintptr_t at = (reinterpret_cast<uintptr_t>(scratch) + 63) & ~static_cast<uintptr_t>(63);
  return *reinterpret_cast<AttentionScratch*>(at);
}

// --- merging splits ------------------------------------------------------------------------------------------------------

// o gets the later o2. Nothing there or nothing to come is a weight of 0 beside one of 1, and gives the bits of the other.
CALSTACK_INLINE void merge_o(float* o, const float* o2, int n, float a, float b) {
  const F32x16 wa = F32x16::broadcast(a), wb = F32x16::broadcast(b);
  for (int d = 0; d < n; d += 16) {
    const int lanes = smaller(16, n - d);
    fma(F32x16::load_first(o2 + d, lanes), wb, F32x16::load_first(o + d, lanes) * wa).store_first(o + d, lanes);
  }
}

// Sixteen vectors' M and L get those of the later split; what O is to be weighted with comes back in a and b.
CALSTACK_INLINE void merge_ml(F32x16& m, F32x16& l, F32x16 m2, F32x16 l2, float* a, float* b) {
  F32x16 x[2];
  const F32x16 top = max(m, m2);
  x[0] = m - top;
  x[1] = m2 - top;
  exp_each<2, true>(x);
  l = fma(l2, x[1], l * x[0]);
  m = top;
  x[0].store(a);
  x[1].store(b);
}

void merge_split(const Batch& b) {
  alignas(64) float wa[16], wb[16];
  for (int i0 = 0; i0 < b.n; i0 += 16) {
    const int n = smaller(16, b.n - i0);
    F32x16 m = F32x16::load_first(b.x.total_m + i0, n), l = F32x16::load_first(b.x.total_l + i0, n);
    merge_ml(m, l, F32x16::load_first(b.x.m + i0, n), F32x16::load_first(b.x.l + i0, n), wa, wb);
    m.store_first(b.x.total_m + i0, n);
    l.store_first(b.x.total_l + i0, n);
    for (int i = 0; i < n; ++i) merge_o(b.total(i0 + i), b.o(i0 + i), b.s.head_dim, wa[i], wb[i]);
  }
}

CALSTACK_INLINE void copy_o(float* o, const float* o2, int n) {
  for (int d = 0; d < n; d += 16) F32x16::load_first(o2 + d, smaller(16, n - d)).store_first(o + d, smaller(16, n - d));
}

CALSTACK_INLINE void clear(float* o, int n) {
  for (int d = 0; d < n; d += 16) F32x16::zero().store_first(o + d, smaller(16, n - d));
}

CALSTACK_INLINE void divide(const float* o, float l, int n, float* out) {
  const F32x16 by = F32x16::broadcast(l);
  for (int d = 0; d < n; d += 16) {
    const int lanes = smaller(16, n - d);
    (F32x16::load_first(o + d, lanes) / by).store_first(out + d, lanes);
  }
}

// --- entry points --------------------------------------------------------------------------------------------------------

template <class S>
void load_query(const Batch& b, int i, const float* q, int position) {
  const F32x16 scale = F32x16::broadcast(b.s.scale);
  for (int d = 0; d < b.s.head_dim; d += 16)
    put_left<S>(F32x16::load_first(q + d, smaller(16, b.s.head_dim - d)) * scale, b.q(i), static_cast<size_t>(d));
  b.x.position[b.first + i] = position;
}

template <class S>
void attend(const Batch& b) {
  for (int i = 0; i < b.n; ++i) {
    b.x.total_m[i] = kMinusInf;
    b.x.total_l[i] = 0.0f;
    clear(b.total(i), b.s.head_dim);
  }
  const int last = b.position(b.n - 1) / kSplitKeys;
  for (int split = b.first_seen(b.position(0)) / kSplitKeys; split <= last; ++split) {
    take_split<S>(b, split);
    merge_split(b);
  }
}

// Query vectors are numbered row by row, the heads of the KV head's group inside.
void attention(const float* qkv, size_t xs, const AttnShape& s, const KVView& kv, int lane, const int32_t* positions, int kv_head, int r0, int r1,
               float* out, size_t os, void* scratch) {
  const int group = s.heads / s.kv_heads, total = (r1 - r0) * group;
  Batch b{s, kv, kv.tables[lane], static_cast<size_t>(kv_head), aligned(scratch), 1, 0, 0};
  for (int begin = 0; begin < total; begin += kAttentionBatch) {
    b.n = smaller(kAttentionBatch, total - begin);
    const auto row = [&](int i) { return r0 + (begin + i) / group; };
    const auto column = [&](int i) { return static_cast<size_t>(kv_head * group + (begin + i) % group) * b.dim(); };
    with_stored(kv.type, [&](auto stored) {
      for (int i = 0; i < b.n; ++i) load_query<decltype(stored)>(b, i, qkv + static_cast<size_t>(row(i)) * xs + column(i), positions[row(i)]);
      attend<decltype(stored)>(b);
    });
    for (int i = 0; i < b.n; ++i) divide(b.total(i), b.x.total_l[i], s.head_dim, out + static_cast<size_t>(row(i)) * os + column(i));
  }
}

// Partials of all heads of a row and split: M [heads], L [heads], O [heads][head_dim].
void attention_split(const float* qkv, size_t xs, const AttnShape& s, const KVView& kv, int lane, int position, int h0, int h1, int row, int split,
                     float* ml, float* o, void* scratch) {
  const int group = s.heads / s.kv_heads, most = group < kAttentionBatch ? kAttentionBatch / group : 1;
  for (int h = h0; h < h1; h += most)
    for (int begin = 0; begin < group; begin += kAttentionBatch) {
      const int heads = smaller(most, h1 - h), n = smaller(kAttentionBatch, group - begin);
      const Batch b{s, kv, kv.tables[lane], static_cast<size_t>(h), aligned(scratch), heads, 0, heads * n};
      const size_t head0 = static_cast<size_t>(h * group + begin);
      with_stored(kv.type, [&](auto stored) {
        const float* q = qkv + static_cast<size_t>(row) * xs + head0 * b.dim();
        for (int i = 0; i < b.n; ++i) load_query<decltype(stored)>(b, i, q + static_cast<size_t>(i) * b.dim(), position);
        take_split<decltype(stored)>(b, split);
      });
      for (size_t i = 0; i < static_cast<size_t>(b.n); ++i) {
        ml[head0 + i] = b.x.m[i];
        ml[static_cast<size_t>(s.heads) + head0 + i] = b.x.l[i];
        copy_o(o + (head0 + i) * b.dim(), b.o(static_cast<int>(i)), s.head_dim);
      }
    }
}

// Heads [h0, h1), sixteen at a time: only M is a chain over the splits that has to be waited for.
void attention_merge(const AttnShape& s, const float* ml, const float* o, int splits, int h0, int h1, float* out) {
  alignas(64) float wa[16], wb[16];
  const size_t heads = static_cast<size_t>(s.heads), dim = static_cast<size_t>(s.head_dim);
  for (int h = h0; h < h1; h += 16) {
    const int n = smaller(16, h1 - h);
    float* to = out + static_cast<size_t>(h) * dim;
    F32x16 m = F32x16::broadcast(kMinusInf), l = F32x16::zero();
    for (int i = 0; i < n; ++i) clear(to + static_cast<size_t>(i) * dim, s.head_dim);
    for (size_t split = 0; split < static_cast<size_t>(splits); ++split) {
      const float *m2 = ml + split * 2 * heads + h, *o2 = o + (split * heads + static_cast<size_t>(h)) * dim;
      merge_ml(m, l, F32x16::load_first(m2, n), F32x16::load_first(m2 + heads, n), wa, wb);
      for (int i = 0; i < n; ++i) merge_o(to + static_cast<size_t>(i) * dim, o2 + static_cast<size_t>(i) * dim, s.head_dim, wa[i], wb[i]);
    }
    l.store_first(wa, n);
    for (int i = 0; i < n; ++i) divide(to + static_cast<size_t>(i) * dim, wa[i], s.head_dim, to + static_cast<size_t>(i) * dim);
  }
}

}  // namespace

void fill_attention(KernelTable& t) {
  t.attention = attention;
  t.attention_split = attention_split;
  t.attention_merge = attention_merge;
}

}  // namespace CALSTACK_ISA
}  // namespace calstack
