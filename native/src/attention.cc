// Attention over the paged cache. Query vectors (query head x row) of one KV head are taken in batches that share one pass over its key
// tiles: prefill turns a tile into floats once per batch, decode (a handful of vectors) reads it as stored.
#include "attention_tile.h"
#include "kernel_parts.h"

namespace calstack {
namespace CALSTACK_ISA {
namespace {

constexpr float kMinusInf = -__builtin_inff();

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
  // Keys of the tile at key0 that vector i sees.
  Range seen(int i, int key0) const {
    return {clamp(first_seen(x.position[i]) - key0, kKeyTile), clamp(x.position[i] + 1 - key0, kKeyTile)};
  }
};

AttentionScratch& aligned(void* scratch) {
  const uintptr_t at = (reinterpret_cast<uintptr_t>(scratch) + 63) & ~static_cast<uintptr_t>(63);
  return *reinterpret_cast<AttentionScratch*>(at);
}

template <class T>
const T* plane(const Batch& b, int tile, size_t index) {
  const uint8_t* layer = b.kv.base + static_cast<size_t>(b.table[tile]) * b.kv.block_bytes + b.kv.layer_offset;
  return reinterpret_cast<const T*>(layer) + index * kKeyTile * b.dim();
}
template <class T>
const T* keys_of(const Batch& b, int tile) {
  return plane<T>(b, tile, b.kv_head);
}
template <class T>
const T* values_of(const Batch& b, int tile) {
  return plane<T>(b, tile, static_cast<size_t>(b.kv.kv_heads) + b.kv_head);
}

// --- scores to probabilities ---------------------------------------------------------------------------------------------

F32x16 keep_lanes(F32x16 s, Range r) {
  const F32x16 none = F32x16::broadcast(kMinusInf);
  s = select(first_lanes(clamp(r.hi, 16)), s, none);
  return select(first_lanes(clamp(r.lo, 16)), none, s);
}

// Turns the scores at `s` into p and returns the sums of the tile; m becomes the new maximum.
CALSTACK_INLINE F32x16 probabilities(const AttnShape& shape, Range r, float* s, float& m) {
  F32x16 a[4];
  for (int i = 0; i < 4; ++i) a[i] = F32x16::load(s + i * 16);
  if (shape.softcap != 0.0f) {
    const F32x16 cap = F32x16::broadcast(shape.softcap);
    for (int i = 0; i < 4; ++i) a[i] = cap * tanh(a[i] / cap);
  }
  if (r.lo > 0 || r.hi < kKeyTile)
    for (int i = 0; i < 4; ++i) a[i] = keep_lanes(a[i], {r.lo - i * 16, r.hi - i * 16});
  const F32x16 top = max(max(a[0], a[1]), max(a[2], a[3]));
  if (bits(less(F32x16::broadcast(m), top))) m = max_lane(top);
  const F32x16 highest = F32x16::broadcast(m);
  for (int i = 0; i < 4; ++i) {
    a[i] = exp(a[i] - highest);
    a[i].store(s + i * 16);
  }
  return ((a[0] + a[1]) + a[2]) + a[3];
}

// Softmax step of the vectors [i0, i0 + rows) for the tile at key0; true when some c is not 1.
bool softmax_block(Batch& b, int i0, int rows, int key0) {
  alignas(64) float change[16] = {};
  F32x16 sums[kRows];
  bool changed = false;
  for (int r = 0; r < rows; ++r) {
    const int i = i0 + r;
    const Range seen = b.seen(i, key0);
    if (seen.empty()) {
      sums[r] = F32x16::zero();
      continue;
    }
    const float before = b.x.m[i];
    sums[r] = probabilities(b.s, seen, b.x.s + i * kKeyTile, b.x.m[i]);
    change[r] = before - b.x.m[i];
    changed |= before != b.x.m[i];
  }
  if (changed) exp(F32x16::load(change)).store(change);
  for (int r = 0; r < rows; ++r) {
    float* lanes = b.x.lanes + (i0 + r) * 16;
    const float c = changed ? change[r] : 1.0f;
    fma(F32x16::load(lanes), F32x16::broadcast(c), sums[r]).store(lanes);
    b.x.c[i0 + r] = c;
  }
  return changed;
}

// --- one tile ------------------------------------------------------------------------------------------------------------

template <class T>
struct Tile {
  const T* k;
  const T* v;
  size_t v_stride;
  int key0;
};

CALSTACK_INLINE void scale_rows(const Batch& b, int i0, int rows) {
  for (int i = i0; i < i0 + rows; ++i)
    for (int d = 0; d < b.dim_vectors(); ++d) {
      float* o = b.x.o + static_cast<size_t>(i) * kRowStride + d * 16;
      (F32x16::load(o) * F32x16::broadcast(b.x.c[i])).store(o);
    }
}

template <class T, class Hint>
void add_values(const Batch& b, const Tile<T>& t, int i0, int rows, Range keys, const float* c, Hint ahead) {
  if (keys.empty()) return;
  value_tile_rows<kRows>(rows, b.x.s + i0 * kKeyTile, t.v, t.v_stride, b.dim_vectors(), keys.lo, keys.hi, c,
                         b.x.o + static_cast<size_t>(i0) * kRowStride, ahead);
}

// A block whose vectors see different keys: what all see is taken together, the rest by vectors of equal position.
template <class T>
void add_uneven_values(const Batch& b, const Tile<T>& t, int i0, int rows) {
  const int end = i0 + rows;
  const Range all{b.seen(end - 1, t.key0).lo, b.seen(i0, t.key0).hi};
  const auto each = [&](auto part) {
    for (int i = i0; i < end;) {
      int next = i + 1;
      while (next < end && b.x.position[next] == b.x.position[i]) ++next;
      add_values(b, t, i, next - i, part(b.seen(i, t.key0)), nullptr, NoHint{});
      i = next;
    }
  };
  if (all.empty()) return each([](Range r) { return r; });
  each([&](Range r) { return Range{r.lo, smaller(r.hi, all.lo)}; });
  add_values(b, t, i0, rows, all, nullptr, NoHint{});
  each([&](Range r) { return Range{larger(r.lo, all.hi), r.hi}; });
}

template <class T, class Hint>
void add_block(Batch& b, const Tile<T>& t, int i0, int rows, bool scaled, Hint ahead) {
  const Range first = b.seen(i0, t.key0), last = b.seen(i0 + rows - 1, t.key0);
  const bool even = first.lo == last.lo && first.hi == last.hi;
  if (even) return add_values(b, t, i0, rows, first, scaled ? b.x.c + i0 : nullptr, ahead);
  if (scaled) scale_rows(b, i0, rows);
  add_uneven_values(b, t, i0, rows);
}

template <class T, class Hint>
void add_tile(Batch& b, const Tile<T>& t, Hint k_ahead, Hint v_ahead) {
  bool active[kAttentionBatch], scaled[kAttentionBatch];  // by block
  for (int i = 0; i < b.n; i += kRows) {
    const int rows = smaller(kRows, b.n - i), last = i + rows - 1;
    const int hi = b.seen(last, t.key0).hi;
    active[i / kRows] = hi > 0 && b.seen(i, t.key0).lo < kKeyTile;
    if (!active[i / kRows]) continue;
    score_tile_rows<kRows>(rows, b.x.q + static_cast<size_t>(i) * kRowStride, t.k, b.dim(), hi, b.x.s + i * kKeyTile, k_ahead);
    scaled[i / kRows] = softmax_block(b, i, rows, t.key0);
  }
  for (int i = 0; i < b.n; i += kRows)
    if (active[i / kRows]) add_block(b, t, i, smaller(kRows, b.n - i), scaled[i / kRows], v_ahead);
}

// The tile as floats in scratch, values padded to whole vectors.
template <class T>
Tile<float> widen(Batch& b, int tile) {
  const T *k = keys_of<T>(b, tile), *v = values_of<T>(b, tile);
  const size_t dim = b.dim(), whole = dim / 16 * 16, stride = static_cast<size_t>(b.dim_vectors()) * 16;
  for (size_t i = 0; i < dim * kKeyTile; i += 16) load_keys(k + i).store(b.x.k + i);
  for (int j = 0; j < kKeyTile; ++j, v += dim) {
    float* to = b.x.v + static_cast<size_t>(j) * stride;
    for (size_t d = 0; d < whole; d += 16) load_keys(v + d).store(to + d);
    for (size_t d = whole; d < dim; ++d) to[d] = load_one(v + d);
  }
  return {b.x.k, b.x.v, stride, tile * kKeyTile};
}

template <class T>
void take_tile(Batch& b, int tile, int next) {
  const bool whole = b.s.head_dim % 16 == 0;
  if (whole && b.n <= 2 * kRows) {
    const Ahead k{reinterpret_cast<const uint8_t*>(keys_of<T>(b, next)), kKeyTile * sizeof(T)};
    const Ahead v{reinterpret_cast<const uint8_t*>(values_of<T>(b, next)), b.dim() * sizeof(T)};
    return add_tile(b, Tile<T>{keys_of<T>(b, tile), values_of<T>(b, tile), b.dim(), tile * kKeyTile}, k, v);
  }
  add_tile(b, widen<T>(b, tile), NoHint{}, NoHint{});
}

// --- splits --------------------------------------------------------------------------------------------------------------

void start_split(Batch& b) {
  for (int i = 0; i < b.n; ++i) {
    b.x.m[i] = kMinusInf;
    F32x16::zero().store(b.x.lanes + i * 16);
    for (int d = 0; d < b.dim_vectors(); ++d) F32x16::zero().store(b.x.o + static_cast<size_t>(i) * kRowStride + d * 16);
  }
}

template <class T>
void take_split(Batch& b, int split) {
  constexpr int tiles = kSplitKeys / kKeyTile;
  start_split(b);
  const int begin = larger(split * tiles, b.first_seen(b.x.position[0]) / kKeyTile);
  const int end = smaller((split + 1) * tiles, b.x.position[b.n - 1] / kKeyTile + 1), last = b.x.position[b.n - 1] / kKeyTile;
  for (int tile = begin; tile < end; ++tile) take_tile<T>(b, tile, smaller(tile + 1, last));
}

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

void merge_split(Batch& b) {
  for (int i = 0; i < b.n; ++i) {
    const size_t at = static_cast<size_t>(i) * kRowStride;
    merge(b.x.total_m[i], b.x.total_l[i], b.x.total + at, b.x.m[i], tree_sum(F32x16::load(b.x.lanes + i * 16)), b.x.o + at, b.s.head_dim);
  }
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
  float* to = b.x.q + static_cast<size_t>(i) * kRowStride;
  for (int d = 0; d < b.s.head_dim; d += 16) (F32x16::load_first(q + d, smaller(16, b.s.head_dim - d)) * scale).store(to + d);
  b.x.position[i] = position;
  b.x.total_m[i] = kMinusInf;
}

template <class T>
void attend(Batch& b) {
  const int last = b.x.position[b.n - 1] / kSplitKeys;
  for (int split = b.first_seen(b.x.position[0]) / kSplitKeys; split <= last; ++split) {
    take_split<T>(b, split);
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
    kv.type == KVType::f32 ? attend<float>(b) : attend<Bf16>(b);
    for (int i = 0; i < b.n; ++i)
      divide(b.x.total + static_cast<size_t>(i) * kRowStride, b.x.total_l[i], s.head_dim,
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
    kv.type == KVType::f32 ? take_split<float>(b, split) : take_split<Bf16>(b, split);
    for (int i = 0; i < b.n; ++i) {
      ml[2 * (begin + i)] = b.x.m[i];
      ml[2 * (begin + i) + 1] = tree_sum(F32x16::load(b.x.lanes + i * 16));
      copy_o(o + static_cast<size_t>(begin + i) * b.dim(), b.x.o + static_cast<size_t>(i) * kRowStride, s.head_dim);
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
