// Attention over the paged cache. Query vectors (query head x row) of one KV head are taken in batches that share one pass over its keys,
// split by split: scores of all tiles, one softmax, then the values. Prefill turns a tile into floats once per batch; decode (a handful of
// vectors) reads it as stored.
#include "attention_tile.h"
#include "kernel_parts.h"
#include "kv_layout.h"

namespace calstack {
namespace CALSTACK_ISA {
namespace {

constexpr float kMinusInf = -__builtin_inff();
constexpr int kSplitTiles = kSplitKeys / kKeyTile;

CALSTACK_INLINE int smaller(int a, int b) { return a < b ? a : b; }
CALSTACK_INLINE int larger(int a, int b) { return a > b ? a : b; }
CALSTACK_INLINE int clamp(int x, int top) { return x < 0 ? 0 : smaller(x, top); }

struct Range {
  int lo, hi;
  bool empty() const { return lo >= hi; }
};

// One batch of query vectors of one KV head, in ascending position.
struct Batch {
  const AttnShape& s;
  const KVView& kv;
  const int32_t* table;
  size_t kv_head;
  AttentionScratch& x;
  int n;

  size_t dim() const { return static_cast<size_t>(s.head_dim); }
  int dim_vectors() const { return (s.head_dim + 15) / 16; }
  int first_seen(int position) const { return s.window > 0 ? larger(0, position - s.window + 1) : 0; }
  // Keys of [key0, key0 + width) that vector i sees, counted from key0.
  Range seen(int i, int key0, int width) const {
    return {clamp(first_seen(x.position[i]) - key0, width), clamp(x.position[i] + 1 - key0, width)};
  }
  // Tiles of the split that some vector sees.
  Range tiles(int split) const {
    return {larger(split * kSplitTiles, first_seen(x.position[0]) / kKeyTile),
            smaller((split + 1) * kSplitTiles, x.position[n - 1] / kKeyTile + 1)};
  }
  float* q(int i) const { return x.q + static_cast<size_t>(i) * kRowStride; }
  float* o(int i) const { return x.o + static_cast<size_t>(i) * kRowStride; }
  float* total(int i) const { return x.total + static_cast<size_t>(i) * kRowStride; }
  float* scores(int i) const { return x.s + static_cast<size_t>(i) * kScoreStride; }
};

AttentionScratch& aligned(void* scratch) {
  const uintptr_t at = (reinterpret_cast<uintptr_t>(scratch) + 63) & ~static_cast<uintptr_t>(63);
  return *reinterpret_cast<AttentionScratch*>(at);
}

// --- where keys and values lie -------------------------------------------------------------------------------------------

// What K and V are stored as.
template <class KT, class VT>
struct Stored {
  using K = KT;
  using V = VT;
};

const uint8_t* layer_of(const Batch& b, int tile) {
  return b.kv.base + static_cast<size_t>(b.table[tile]) * b.kv.block_bytes + b.kv.layer_offset;
}
KVPlaces places(const Batch& b) { return KVPlaces(b.kv.type, b.kv.kv_heads, b.kv.head_dim); }
template <class T>
const T* keys_of(const Batch& b, int tile) {
  return reinterpret_cast<const T*>(layer_of(b, tile) + places(b).k(b.kv_head));
}
template <class T>
const T* values_of(const Batch& b, int tile) {
  return reinterpret_cast<const T*>(layer_of(b, tile) + places(b).v(b.kv_head));
}

// Scores, or p, of every vector times the scales of the tile's keys or values; what a vector does not see may become anything.
void scale_tile(const Batch& b, int tile, size_t scales) {
  const float* scale = reinterpret_cast<const float*>(layer_of(b, tile) + scales);
  const int column = tile % kSplitTiles * kKeyTile;
  F32x16 by[kKeyTile / 16];
  for (int v = 0; v < kKeyTile / 16; ++v) by[v] = F32x16::load(scale + 16 * v);
  for (int i = 0; i < b.n; ++i) {
    float* s = b.scores(i) + column;
    for (int v = 0; v < kKeyTile / 16; ++v) (F32x16::load(s + 16 * v) * by[v]).store(s + 16 * v);
  }
}

// A handful of vectors take the cache as stored: turning it into floats first would cost more than it saves.
bool reads_directly(const Batch& b) { return b.s.head_dim % 16 == 0 && b.n <= 2 * kRows; }

template <class T>
const float* widen_keys(const Batch& b, int tile) {
  const T* k = keys_of<T>(b, tile);
  for (size_t i = 0; i < b.dim() * kKeyTile; i += 16) load_keys(k + i).store(b.x.tile + i);
  return b.x.tile;
}

template <class T>
const float* widen_values(const Batch& b, int tile) {
  const T* v = values_of<T>(b, tile);
  const size_t dim = b.dim(), whole = dim / 16 * 16, stride = static_cast<size_t>(b.dim_vectors()) * 16;
  for (size_t j = 0; j < kKeyTile; ++j, v += dim) {
    float* to = b.x.tile + j * stride;
    for (size_t d = 0; d < whole; d += 16) load_keys(v + d).store(to + d);
    for (size_t d = whole; d < dim; ++d) to[d] = load_one(v + d);
  }
  return b.x.tile;
}

// --- scores --------------------------------------------------------------------------------------------------------------

template <class T, class Hint>
void score_blocks(const Batch& b, int tile, const T* k, Hint ahead) {
  const int key0 = tile * kKeyTile, column = tile % kSplitTiles * kKeyTile;
  for (int i = 0; i < b.n; i += kRows) {
    const int rows = smaller(kRows, b.n - i);
    const Range r{b.seen(i, key0, kKeyTile).lo, b.seen(i + rows - 1, key0, kKeyTile).hi};
    if (!r.empty()) score_tile<kRows>(rows, b.q(i), k, b.dim(), r.hi, b.scores(i) + column, ahead);
  }
}

// The planes of a split in the order they are read: keys of its tiles, then values, then the keys of the tile after it (or the last
// again: the hint costs nothing when the lines are there).
struct Plane {
  const uint8_t* at;
  size_t bytes;
};
template <class S>
Plane plane_in_order(const Batch& b, Range tiles, int i) {
  const int n = tiles.hi - tiles.lo;
  const auto keys = [&](int tile) {
    return Plane{reinterpret_cast<const uint8_t*>(keys_of<typename S::K>(b, tile)), kKeyTile * b.dim() * sizeof(typename S::K)};
  };
  if (i < n) return keys(tiles.lo + i);
  if (i >= 2 * n) return keys(smaller(tiles.hi + i - 2 * n, b.x.position[b.n - 1] / kKeyTile));
  return {reinterpret_cast<const uint8_t*>(values_of<typename S::V>(b, tiles.lo + i - n)), kKeyTile * b.dim() * sizeof(typename S::V)};
}

// While one plane is computed, the next is touched. Two ahead was slower from memory (8 KiB planes 27 against 30 GB/s on one thread,
// 16 KiB planes 26 against 28), and so was touching into the second level only.
constexpr int kPlanesAhead = 1;

// Over `steps` iterations.
template <class S>
Ahead plane_ahead(const Batch& b, Range tiles, int i, size_t steps) {
  const Plane next = plane_in_order<S>(b, tiles, i + kPlanesAhead);
  return {next.at, next.bytes / steps};
}

template <class S>
void touch_first_planes(const Batch& b, Range tiles) {
  for (int i = 0; i < kPlanesAhead; ++i) {
    const Plane p = plane_in_order<S>(b, tiles, i);
    Ahead{p.at, p.bytes}.touch();
  }
}

template <class S>
void score_split(const Batch& b, Range tiles) {
  using T = typename S::K;
  const bool direct = reads_directly(b);
  for (int tile = tiles.lo; tile < tiles.hi; ++tile) {
    if (direct)
      score_blocks(b, tile, keys_of<T>(b, tile), plane_ahead<S>(b, tiles, tile - tiles.lo, b.dim()));
    else
      score_blocks(b, tile, widen_keys<T>(b, tile), NoHint{});
    if (k_scaled(b.kv.type)) scale_tile(b, tile, places(b).k_scale(b.kv_head));
  }
}

// --- softmax of a split --------------------------------------------------------------------------------------------------

CALSTACK_INLINE void keep_lanes(float* s, Range r) {
  const F32x16 none = F32x16::broadcast(kMinusInf);
  const F32x16 below = select(first_lanes(clamp(r.hi, 16)), F32x16::load(s), none);
  select(first_lanes(clamp(r.lo, 16)), none, below).store(s);
}

void cap_scores(float* s, int from, int to, float softcap) {
  const F32x16 cap = F32x16::broadcast(softcap);
  for (int v = from; v < to; v += 16) (cap * tanh(F32x16::load(s + v) / cap)).store(s + v);
}

CALSTACK_INLINE float highest_score(const float* s, int n) {
  F32x16 top[4];
  for (int j = 0; j < 4; ++j) top[j] = F32x16::load(s + smaller(j * 16, n - 16));
  for (int v = 64; v < n; v += 16) top[v / 16 % 4] = max(top[v / 16 % 4], F32x16::load(s + v));
  return max_lane(max(max(top[0], top[1]), max(top[2], top[3])));
}

template <int N>
CALSTACK_INLINE F32x16 exp_block(float* s, F32x16 m, F32x16 sum) {
  F32x16 p[N];
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) p[j] = F32x16::load(s + j * 16) - m;
  exp_each<N, true>(p);
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) {
    p[j].store(s + j * 16);
    sum = sum + p[j];
  }
  return sum;
}

// Scores to p; returns the sixteen sums.
CALSTACK_INLINE F32x16 exp_scores(float* s, int n, F32x16 m) {
  constexpr int together = kWide ? 8 : 2;
  F32x16 sum = F32x16::zero();
  int v = 0;
  for (; v + together * 16 <= n; v += together * 16) sum = exp_block<together>(s + v, m, sum);
  for (; kWide && v + 32 <= n; v += 32) sum = exp_block<2>(s + v, m, sum);
  for (; v < n; v += 16) sum = exp_block<1>(s + v, m, sum);
  return sum;
}

// Whole vectors of sixteen that hold the seen keys.
Range whole(Range r) { return {r.lo & ~15, (r.hi + 15) & ~15}; }

// Ends a vector's scores (cap, unseen keys to -inf) and finds M.
float end_scores(const Batch& b, float* s, Range r) {
  const Range all = whole(r);
  if (b.s.softcap != 0.0f) cap_scores(s, all.lo, all.hi, b.s.softcap);
  if (r.lo > all.lo) keep_lanes(s + all.lo, {r.lo - all.lo, r.hi - all.lo});
  if (r.hi < all.hi) keep_lanes(s + all.hi - 16, {r.lo - all.hi + 16, r.hi - all.hi + 16});
  return highest_score(s + all.lo, all.hi - all.lo);
}

// Scores to p, M and L of every vector. All maxima come first: each is a chain that the processor overlaps with the others.
void softmax(const Batch& b, int split) {
  for (int i = 0; i < b.n; ++i) {
    const Range r = b.seen(i, split * kSplitKeys, kSplitKeys);
    b.x.m[i] = r.empty() ? kMinusInf : end_scores(b, b.scores(i), r);
  }
  for (int i = 0; i < b.n; ++i) {
    const Range all = whole(b.seen(i, split * kSplitKeys, kSplitKeys));
    b.x.l[i] = all.empty() ? 0.0f : tree_sum(exp_scores(b.scores(i) + all.lo, all.hi - all.lo, F32x16::broadcast(b.x.m[i])));
  }
}

// --- values --------------------------------------------------------------------------------------------------------------

template <class T>
struct ValueTile {
  const T* v;
  size_t stride;
  int key0;
};

template <class T, class Hint>
void add_values(const Batch& b, const ValueTile<T>& t, int i, int rows, Range keys, Hint ahead) {
  if (keys.empty()) return;
  const float* p = b.scores(i) + t.key0 % kSplitKeys;
  value_tile<kRows>(rows, p, t.v, t.stride, b.dim_vectors(), keys.lo, keys.hi, b.o(i), ahead);
}

// A block whose vectors see different keys: what all see is taken together, the rest by vectors of equal position.
template <class T>
void add_uneven_values(const Batch& b, const ValueTile<T>& t, int i0, int rows) {
  const int end = i0 + rows;
  const Range all{b.seen(end - 1, t.key0, kKeyTile).lo, b.seen(i0, t.key0, kKeyTile).hi};
  const auto each = [&](auto part) {
    for (int i = i0; i < end;) {
      int next = i + 1;
      while (next < end && b.x.position[next] == b.x.position[i]) ++next;
      add_values(b, t, i, next - i, part(b.seen(i, t.key0, kKeyTile)), NoHint{});
      i = next;
    }
  };
  if (all.empty()) return each([](Range r) { return r; });
  each([&](Range r) { return Range{r.lo, smaller(r.hi, all.lo)}; });
  add_values(b, t, i0, rows, all, NoHint{});
  each([&](Range r) { return Range{larger(r.lo, all.hi), r.hi}; });
}

template <class T, class Hint>
void value_blocks(const Batch& b, const ValueTile<T>& t, Hint ahead) {
  for (int i = 0; i < b.n; i += kRows) {
    const int rows = smaller(kRows, b.n - i);
    const Range first = b.seen(i, t.key0, kKeyTile), last = b.seen(i + rows - 1, t.key0, kKeyTile);
    if (first.lo == last.lo && first.hi == last.hi)
      add_values(b, t, i, rows, first, ahead);
    else
      add_uneven_values(b, t, i, rows);
  }
}

template <class S>
void value_split(const Batch& b, Range tiles) {
  using T = typename S::V;
  const bool direct = reads_directly(b);
  for (int i = 0; i < b.n; ++i)
    for (int d = 0; d < b.dim_vectors(); ++d) F32x16::zero().store(b.o(i) + d * 16);
  for (int tile = tiles.lo; tile < tiles.hi; ++tile) {
    if (v_scaled(b.kv.type)) scale_tile(b, tile, places(b).v_scale(b.kv_head));
    if (!direct) {
      const size_t stride = static_cast<size_t>(b.dim_vectors()) * 16;
      value_blocks(b, ValueTile<float>{widen_values<T>(b, tile), stride, tile * kKeyTile}, NoHint{});
      continue;
    }
    const int order = tiles.hi - tiles.lo + tile - tiles.lo;
    const ValueTile<T> t{values_of<T>(b, tile), b.dim(), tile * kKeyTile};
    value_blocks(b, t, plane_ahead<S>(b, tiles, order, kKeyTile));
  }
}

// M, L and O of one split for every vector.
template <class S>
void take_split(const Batch& b, int split) {
  const Range tiles = b.tiles(split);
  if (reads_directly(b)) touch_first_planes<S>(b, tiles);
  score_split<S>(b, tiles);
  softmax(b, split);
  value_split<S>(b, tiles);
}

// f() for the form the cache has.
template <class F>
CALSTACK_INLINE void with_stored(KVType type, F f) {
  if (type == KVType::f32) return f(Stored<float, float>{});
  if (type == KVType::bf16) return f(Stored<Bf16, Bf16>{});
  return type == KVType::i8 ? f(Stored<Int8, Int8>{}) : f(Stored<Bf16, Int8>{});
}

// --- merging splits ------------------------------------------------------------------------------------------------------

// a = weight of what is there, b = of what comes.
struct Weights {
  float m, a, b;
};

CALSTACK_INLINE Weights merge_weights(float m1, float m2) {
  alignas(64) float e[16] = {};
  const float m = m1 > m2 ? m1 : m2;
  e[0] = m1 - m;
  e[1] = m2 - m;
  exp(F32x16::load(e)).store(e);
  return {m, e[0], e[1]};
}

CALSTACK_INLINE void merge_o(float* o, const float* o2, int n, float a, float b) {
  const F32x16 wa = F32x16::broadcast(a), wb = F32x16::broadcast(b);
  for (int d = 0; d < n; d += 16) {
    const int lanes = smaller(16, n - d);
    fma(F32x16::load_first(o2 + d, lanes), wb, F32x16::load_first(o + d, lanes) * wa).store_first(o + d, lanes);
  }
}

CALSTACK_INLINE void copy_o(float* o, const float* o2, int n) {
  for (int d = 0; d < n; d += 16) F32x16::load_first(o2 + d, smaller(16, n - d)).store_first(o + d, smaller(16, n - d));
}

// (m, l, o) gets the later split (m2, l2, o2).
CALSTACK_INLINE void merge(float& m, float& l, float* o, float m2, float l2, const float* o2, int n) {
  if (m2 == kMinusInf) return;
  if (m == kMinusInf) {
    m = m2;
    l = l2;
    return copy_o(o, o2, n);
  }
  const Weights w = merge_weights(m, m2);
  m = w.m;
  l = __builtin_fmaf(l2, w.b, l * w.a);
  merge_o(o, o2, n, w.a, w.b);
}

void merge_split(const Batch& b) {
  for (int i = 0; i < b.n; ++i) merge(b.x.total_m[i], b.x.total_l[i], b.total(i), b.x.m[i], b.x.l[i], b.o(i), b.s.head_dim);
}

CALSTACK_INLINE void divide(const float* o, float l, int n, float* out) {
  const F32x16 by = F32x16::broadcast(l);
  for (int d = 0; d < n; d += 16) {
    const int lanes = smaller(16, n - d);
    (F32x16::load_first(o + d, lanes) / by).store_first(out + d, lanes);
  }
}

// --- entry points --------------------------------------------------------------------------------------------------------

// Query vectors are numbered row by row, the heads of the KV head's group inside.
struct Vectors {
  int kv_head, group, first_row;
  int row(int i) const { return first_row + i / group; }
  size_t head(int i) const { return static_cast<size_t>(kv_head * group + i % group); }
};

void load_query(const Batch& b, int i, const float* q, int position) {
  const F32x16 scale = F32x16::broadcast(b.s.scale);
  float* to = b.q(i);
  for (int d = 0; d < b.s.head_dim; d += 16) (F32x16::load_first(q + d, smaller(16, b.s.head_dim - d)) * scale).store(to + d);
  b.x.position[i] = position;
  b.x.total_m[i] = kMinusInf;
}

template <class S>
void attend(const Batch& b) {
  const int last = b.x.position[b.n - 1] / kSplitKeys;
  for (int split = b.first_seen(b.x.position[0]) / kSplitKeys; split <= last; ++split) {
    take_split<S>(b, split);
    merge_split(b);
  }
}

void attention(const float* qkv, size_t xs, const AttnShape& s, const KVView& kv, int lane, const int32_t* positions, int kv_head, int r0, int r1,
               float* out, size_t os, void* scratch) {
  const Vectors at{kv_head, s.heads / s.kv_heads, r0};
  const int total = (r1 - r0) * at.group;
  Batch b{s, kv, kv.tables[lane], static_cast<size_t>(kv_head), aligned(scratch), 0};
  for (int begin = 0; begin < total; begin += kAttentionBatch) {
    b.n = smaller(kAttentionBatch, total - begin);
    for (int i = 0; i < b.n; ++i) {
      const int row = at.row(begin + i);
      load_query(b, i, qkv + static_cast<size_t>(row) * xs + at.head(begin + i) * b.dim(), positions[row]);
    }
    with_stored(kv.type, [&](auto stored) { attend<decltype(stored)>(b); });
    for (int i = 0; i < b.n; ++i)
      divide(b.total(i), b.x.total_l[i], s.head_dim,
             out + static_cast<size_t>(at.row(begin + i)) * os + at.head(begin + i) * b.dim());
  }
}

void attention_split(const float* qkv, size_t xs, const AttnShape& s, const KVView& kv, int lane, int position, int kv_head, int row, int split,
                     float* ml, float* o, void* scratch) {
  const Vectors at{kv_head, s.heads / s.kv_heads, row};
  Batch b{s, kv, kv.tables[lane], static_cast<size_t>(kv_head), aligned(scratch), 0};
  for (int begin = 0; begin < at.group; begin += kAttentionBatch) {
    b.n = smaller(kAttentionBatch, at.group - begin);
    for (int i = 0; i < b.n; ++i) load_query(b, i, qkv + static_cast<size_t>(row) * xs + at.head(begin + i) * b.dim(), position);
    with_stored(kv.type, [&](auto stored) { take_split<decltype(stored)>(b, split); });
    for (int i = 0; i < b.n; ++i) {
      ml[2 * (begin + i)] = b.x.m[i];
      ml[2 * (begin + i) + 1] = b.x.l[i];
      copy_o(o + static_cast<size_t>(begin + i) * b.dim(), b.o(i), s.head_dim);
    }
  }
}

void attention_merge(const AttnShape& s, const float* ml, const float* o, int splits, int kv_head, float* out) {
  const int group = s.heads / s.kv_heads;
  for (int g = 0; g < group; ++g) {
    float* to = out + static_cast<size_t>(kv_head * group + g) * static_cast<size_t>(s.head_dim);
    float m = kMinusInf, l = 0.0f;
    for (int split = 0; split < splits; ++split) {
      const size_t at = static_cast<size_t>(split * group + g);
      merge(m, l, to, ml[2 * at], ml[2 * at + 1], o + at * static_cast<size_t>(s.head_dim), s.head_dim);
    }
    divide(to, l, s.head_dim, to);
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
