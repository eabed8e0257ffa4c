// Register blocks of attention: a few query vectors against one key tile. A query vector is one query head of one row, scaled.
//
//   score_tile:  s[r][64]  = q[r] . K      K = [4][dim][16 keys], each score a chain over dim
//   value_tile:  o[r][dim] += p[r] . V     over the keys [lo, hi) of the tile, a chain over keys
//
// K and V are read as stored (float, bf16 or int8 codes) or from float scratch; scales of codes are the caller's. Accumulators never leave registers inside a block.
#pragma once
#include "attention_scratch.h"
#include "calstack/kernels.h"
#include "half.h"
#include "simd/math.h"
#include "simd/simd.h"

namespace calstack {
namespace CALSTACK_ISA {
namespace {

constexpr bool kWide = kVectorRegisters >= 32;
constexpr int kRows = kWide ? 6 : 3;         // query vectors per register block
constexpr int kKeyVectors = kWide ? 4 : 2;   // of 16 keys, in a score block
constexpr int kDimVectors = kWide ? 4 : 2;   // of 16 dims, in a value block

struct Bf16 {
  uint16_t bits;
};

struct Int8 {
  int8_t code;
};

CALSTACK_INLINE F32x16 load_keys(const float* p) { return F32x16::load(p); }
CALSTACK_INLINE F32x16 load_keys(const Bf16* p) { return F32x16::load_bf16(p); }
CALSTACK_INLINE F32x16 load_keys(const Int8* p) { return F32x16::load_i8(p); }
CALSTACK_INLINE float load_one(const Int8* p) { return (float)p->code; }
CALSTACK_INLINE float load_one(const float* p) { return *p; }
CALSTACK_INLINE float load_one(const Bf16* p) { return bf16_to_f32(p->bits); }

// Touches what comes next while this tile is computed: the cache is read once, in pieces too short for the hardware's prefetcher.
struct Ahead {
  const uint8_t* at;
  size_t step;  // bytes per inner iteration
  CALSTACK_INLINE void touch() {
    for (size_t i = 0; i < step; i += 64) prefetch(at + i);
    at += step;
  }
};

struct NoHint {
  CALSTACK_INLINE void touch() {}
};

template <int R, int N, class T, class Hint>
CALSTACK_INLINE void score_block(const float* q, const T* k, size_t dim, float* s, Hint ahead) {
  F32x16 acc[R][N];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) acc[r][n] = F32x16::zero();
  for (size_t d = 0; d < dim; ++d) {
    F32x16 key[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) key[n] = load_keys(k + (static_cast<size_t>(n) * dim + d) * 16);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const F32x16 x = F32x16::broadcast(q[static_cast<size_t>(r) * kRowStride + d]);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) acc[r][n] = fma(x, key[n], acc[r][n]);
    }
    ahead.touch();
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) acc[r][n].store(s + static_cast<size_t>(r) * kScoreStride + n * 16);
}

template <int R, int D, class T, class Hint>
CALSTACK_INLINE void value_block(const float* p, const T* v, size_t v_stride, int lo, int hi, float* o, Hint ahead) {
  F32x16 acc[R][D];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int n = 0; n < D; ++n) acc[r][n] = F32x16::load(o + static_cast<size_t>(r) * kRowStride + n * 16);
  const T* row = v + static_cast<size_t>(lo) * v_stride;
  for (int j = lo; j < hi; ++j, row += v_stride) {
    F32x16 value[D];
#pragma GCC unroll 8
    for (int n = 0; n < D; ++n) value[n] = load_keys(row + n * 16);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const F32x16 x = F32x16::broadcast(p[static_cast<size_t>(r) * kScoreStride + static_cast<size_t>(j)]);
#pragma GCC unroll 8
      for (int n = 0; n < D; ++n) acc[r][n] = fma(x, value[n], acc[r][n]);
    }
    ahead.touch();
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int n = 0; n < D; ++n) acc[r][n].store(o + static_cast<size_t>(r) * kRowStride + n * 16);
}

// Scores of `rows` (1..kRows) query vectors with the first `keys` keys of the tile, rounded up to whole blocks.
template <int R, class T, class Hint>
void score_tile(int rows, const float* q, const T* k, size_t dim, int keys, float* s, Hint ahead) {
  if constexpr (R > 1)
    if (rows < R) return score_tile<R - 1>(rows, q, k, dim, keys, s, ahead);
  if constexpr (kKeyVectors == 4)
    if (keys > 32) return score_block<R, 4>(q, k, dim, s, ahead);
  score_block<R, 2>(q, k, dim, s, ahead);
  if (keys > 32) score_block<R, 2>(q, k + 32 * dim, dim, s + 32, NoHint{});
}

template <int R, int D, class T, class Hint>
CALSTACK_INLINE void value_dims(int vectors, const float* p, const T* v, size_t v_stride, int lo, int hi, float* o, Hint ahead) {
  if constexpr (D > 1)
    if (vectors < D) return value_dims<R, D - 1>(vectors, p, v, v_stride, lo, hi, o, ahead);
  value_block<R, D>(p, v, v_stride, lo, hi, o, ahead);
}

// dim_vectors = head_dim / 16 rounded up, cut into blocks of nearly equal width.
template <int R, class T, class Hint>
void value_tile(int rows, const float* p, const T* v, size_t v_stride, int dim_vectors, int lo, int hi, float* o, Hint ahead) {
  if constexpr (R > 1)
    if (rows < R) return value_tile<R - 1>(rows, p, v, v_stride, dim_vectors, lo, hi, o, ahead);
  const int blocks = (dim_vectors + kDimVectors - 1) / kDimVectors;
  for (int b = 0; b < blocks; ++b) {
    const int begin = dim_vectors * b / blocks, end = dim_vectors * (b + 1) / blocks;
    if (b == 0)
      value_dims<R, kDimVectors>(end, p, v, v_stride, lo, hi, o, ahead);
    else
      value_dims<R, kDimVectors>(end - begin, p, v + begin * 16, v_stride, lo, hi, o + begin * 16, NoHint{});
  }
}

}  // namespace
}  // namespace CALSTACK_ISA
}  // namespace calstack
