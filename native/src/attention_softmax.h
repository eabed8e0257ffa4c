// From the scores of a split to its p, M and L.
#pragma once
#include "attention_batch.h"

namespace calstack {
namespace CALSTACK_ISA {
namespace {

CALSTACK_INLINE void keep_lanes(float* s, Range r) {
  const F32x16 none = F32x16::broadcast(kMinusInf);
  const F32x16 below = select(first_lanes(clamp(r.hi, 16)), F32x16::load(s), none);
  select(first_lanes(clamp(r.lo, 16)), none, below).store(s);
}

CALSTACK_INLINE void scale_scores(float* s, const float* by, Range all) {
  for (int v = all.lo; v < all.hi; v += 16) (F32x16::load(s + v) * F32x16::load(by + v)).store(s + v);
}

void cap_scores(float* s, Range all, float softcap) {
  const F32x16 cap = F32x16::broadcast(softcap);
  for (int v = all.lo; v < all.hi; v += 16) (cap * tanh(F32x16::load(s + v) / cap)).store(s + v);
}

CALSTACK_INLINE float highest_score(const float* s, int n) {
  F32x16 top[4];
  for (int j = 0; j < 4; ++j) top[j] = F32x16::load(s + smaller(j * 16, n - 16));
  for (int v = 64; v < n; v += 16) top[v / 16 % 4] = max(top[v / 16 % 4], F32x16::load(s + v));
  return max_lane(max(max(top[0], top[1]), max(top[2], top[3])));
}

// p of N vectors at `v`, written over scores that were read before: a left row is never longer than the scores.
template <class S, int N>
CALSTACK_INLINE F32x16 exp_block(float* s, int v, F32x16 m, F32x16 sum, const float* value_scale) {
  F32x16 p[N];
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) p[j] = F32x16::load(s + v + j * 16) - m;
  exp_each<N, true>(p);
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) {
    sum = sum + p[j];
    if constexpr (S::kScaledV) p[j] = p[j] * F32x16::load(value_scale + v + j * 16);
    put_left<S>(p[j], s, static_cast<size_t>(v + j * 16));
  }
  return sum;
}

// Scores of whole vectors [lo, hi) to p, the others of the batch to zero; returns the sixteen sums.
template <class S>
CALSTACK_INLINE F32x16 exp_scores(float* s, Range all, Range batch, F32x16 m, const float* value_scale) {
  constexpr int together = kWide ? 8 : 2;
  F32x16 sum = F32x16::zero();
  for (int v = batch.lo; v < all.lo; v += 16) put_left<S>(F32x16::zero(), s, static_cast<size_t>(v));
  int v = all.lo;
  for (; v + together * 16 <= all.hi; v += together * 16) sum = exp_block<S, together>(s, v, m, sum, value_scale);
  for (; kWide && v + 32 <= all.hi; v += 32) sum = exp_block<S, 2>(s, v, m, sum, value_scale);
  for (; v < all.hi; v += 16) sum = exp_block<S, 1>(s, v, m, sum, value_scale);
  for (; v < batch.hi; v += 16) put_left<S>(F32x16::zero(), s, static_cast<size_t>(v));
  return sum;
}

// Whole vectors of sixteen that hold the seen keys.
CALSTACK_INLINE Range whole(Range r) { return {r.lo & ~15, (r.hi + 15) & ~15}; }

// Ends a vector's scores (scale, cap, unseen keys to -inf) and finds M.
template <class S>
float end_scores(const Batch& b, float* s, Range r) {
  const Range all = whole(r);
  if constexpr (S::kScaledK) scale_scores(s, b.x.k_scale, all);
  if (b.s.softcap != 0.0f) cap_scores(s, all, b.s.softcap);
  if (r.lo > all.lo) keep_lanes(s + all.lo, {r.lo - all.lo, r.hi - all.lo});
  if (r.hi < all.hi) keep_lanes(s + all.hi - 16, {r.lo - all.hi + 16, r.hi - all.hi + 16});
  return highest_score(s + all.lo, all.hi - all.lo);
}

// Scales of the split's keys that some vector sees, zero for the others: what lies there may be anything.
void gather_scales(const Batch& b, int split, Range tiles, size_t place, float* to) {
  const Range r = b.seen_by_any(0, b.n, split * kSplitKeys, kSplitKeys);
  for (int v = 0; v < kSplitKeys; v += 16) F32x16::zero().store(to + v);
  for (int tile = tiles.lo; tile < tiles.hi; ++tile) {
    const int column = tile % kSplitTiles * kKeyTile, lo = larger(r.lo, column), hi = smaller(r.hi, column + kKeyTile);
    if (lo < hi) std::memcpy(to + lo, b.layer(tile) + place + static_cast<size_t>(lo - column) * sizeof(float), static_cast<size_t>(hi - lo) * sizeof(float));
  }
}

// Scores to p, M and L of every vector of one KV head. All maxima come first: each is a chain that the processor overlaps with the others.
template <class S>
void softmax(const Batch& b, int split, Range tiles) {
  if constexpr (S::kScaledK) gather_scales(b, split, tiles, b.places().k_scale(b.kv_head), b.x.k_scale);
  if constexpr (S::kScaledV) gather_scales(b, split, tiles, b.places().v_scale(b.kv_head), b.x.v_scale);
  float *m = b.x.m + b.first, *l = b.x.l + b.first;
  for (int i = 0; i < b.n; ++i) {
    const Range r = b.seen(i, split * kSplitKeys, kSplitKeys);
    m[i] = r.empty() ? kMinusInf : end_scores<S>(b, b.scores(i), r);
  }
  const Range batch = whole(b.seen_by_any(0, b.n, split * kSplitKeys, kSplitKeys));
  for (int i = 0; i < b.n; ++i) {
    const Range r = b.seen(i, split * kSplitKeys, kSplitKeys), all = r.empty() ? Range{batch.lo, batch.lo} : whole(r);
    l[i] = tree_sum(exp_scores<S>(b.scores(i), all, batch, F32x16::broadcast(m[i]), b.x.v_scale));
  }
}

}  // namespace
}  // namespace CALSTACK_ISA
}  // namespace calstack
