// Register blocks of attention: a few query vectors against one key tile. A query vector is one query head of one row, scaled.
//
//   score_tile:  s[r][64]  = q[r] . K      K = [4][dim][16 keys], each score a chain over dim
//   value_tile:  o[r][dim] = o[r] * c[r] + p[r] . V over the keys [lo, hi)
//
// K and V are read as stored (float or bf16) or from float scratch. Accumulators never leave registers inside a block.
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

CALSTACK_INLINE F32x16 load_keys(const float* p) { return F32x16::load(p); }
CALSTACK_INLINE F32x16 load_keys(const Bf16* p) { return F32x16::load_bf16(p); }
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

template <int R, int N, class T, class Hint>
CALSTACK_INLINE void score_block(const float* q, const T* k, size_t dim, float* s, Hint ahead) {
  F32x16 acc[R][N];
  for (int r = 0; r < R; ++r)
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
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) acc[r][n].store(s + r * kKeyTile + n * 16);
}

template <int R, int D, class T, class Hint>
CALSTACK_INLINE void value_block(const float* p, const T* v, size_t v_stride, int lo, int hi, const float* c, float* o, Hint ahead) {
  F32x16 acc[R][D];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < D; ++n) {
      acc[r][n] = F32x16::load(o + static_cast<size_t>(r) * kRowStride + n * 16);
      if (c) acc[r][n] = acc[r][n] * F32x16::broadcast(c[r]);
    }
  const T* row = v + static_cast<size_t>(lo) * v_stride;
  for (int j = lo; j < hi; ++j, row += v_stride) {
    F32x16 value[D];
#pragma GCC unroll 8
    for (int n = 0; n < D; ++n) value[n] = load_keys(row + n * 16);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const F32x16 x = F32x16::broadcast(p[r * kKeyTile + j]);
#pragma GCC unroll 8
      for (int n = 0; n < D; ++n) acc[r][n] = fma(x, value[n], acc[r][n]);
    }
    ahead.touch();
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < D; ++n) acc[r][n].store(o + static_cast<size_t>(r) * kRowStride + n * 16);
}

struct NoHint {
  CALSTACK_INLINE void touch() {}
};

// Scores of `rows` (1..kRows) query vectors with the first `keys` keys of the tile, rounded up to whole blocks.
template <int R, class T, class Hint>
void score_tile_rows(int rows, const float* q, const T* k, size_t dim, int keys, float* s, Hint ahead) {
  if constexpr (R > 1)
    if (rows < R) return score_tile_rows<R - 1>(rows, q, k, dim, keys, s, ahead);
  if constexpr (kKeyVectors == 4)
    if (keys > 32) return score_block<R, 4>(q, k, dim, s, ahead);
  for (int n = 0; n * 16 < keys; n += 2) score_block<R, 2>(q, k + static_cast<size_t>(n) * dim * 16, dim, s + n * 16, ahead);
}

template <int R, int D, class T, class Hint>
CALSTACK_INLINE void value_dims(int vectors, const float* p, const T* v, size_t v_stride, int lo, int hi, const float* c, float* o, Hint ahead) {
  if constexpr (D > 1)
    if (vectors < D) return value_dims<R, D - 1>(vectors, p, v, v_stride, lo, hi, c, o, ahead);
  value_block<R, D>(p, v, v_stride, lo, hi, c, o, ahead);
}

// o of `rows` vectors over the keys [lo, hi); dim_vectors = head_dim / 16 rounded up, cut into blocks of nearly equal width.
template <int R, class T, class Hint>
void value_tile_rows(int rows, const float* p, const T* v, size_t v_stride, int dim_vectors, int lo, int hi, const float* c, float* o, Hint ahead) {
  if constexpr (R > 1)
    if (rows < R) return value_tile_rows<R - 1>(rows, p, v, v_stride, dim_vectors, lo, hi, c, o, ahead);
  const int blocks = (dim_vectors + kDimVectors - 1) / kDimVectors;
  for (int b = 0; b < blocks; ++b) {
    const int begin = dim_vectors * b / blocks, end = dim_vectors * (b + 1) / blocks;
    value_dims<R, kDimVectors>(end - begin, p, v + begin * 16, v_stride, lo, hi, c, o + begin * 16, ahead);
  }
}

}  // namespace
}  // namespace CALSTACK_ISA
}  // namespace calstack
