// Register blocks of attention: a few rows of the left side against pairs of rows of the cache. Accumulators never leave registers inside a
// block; each is one chain, in the order of docs/concepts/numerics.md.
#pragma once
#include "attention_operands.h"

namespace calstack {
namespace CALSTACK_ISA {
namespace {

constexpr bool kWide = kVectorRegisters >= 32;
constexpr int kRows = kWide ? 6 : 3;     // rows of the left side per block
constexpr int kVectors = kWide ? 4 : 2;  // of sixteen lanes, in a block

// Touches what comes next while this tile is computed: the cache is read once, in pieces too short for the hardware's prefetcher.
struct Touch {
  const uint8_t* at;
  size_t step;  // bytes per pair
  CALSTACK_INLINE void touch() {
    for (size_t i = 0; i < step; i += 64) prefetch(at + i);
    at += step;
  }
};

struct NoHint {
  CALSTACK_INLINE void touch() {}
};

// One side of a block: `pairs` pairs of the left rows against as many of the right side, whose rows have `lanes` lanes.
struct Product {
  const uint8_t* left;
  size_t left_stride;
  const uint8_t* right;
  size_t lanes;
  int pairs;
  float* out;
  size_t out_stride;  // floats
};

template <int R, int N, class Op, int step>
CALSTACK_INLINE void add_step(F32x16 (&acc)[R][N], const uint8_t* left, size_t left_stride, const uint8_t* right, size_t lanes) {
  decltype(Op::template right<step>(right, lanes, 0)) value[N];
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n) value[n] = Op::template right<step>(right, lanes, n);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const auto x = Op::template left<step>(left + static_cast<size_t>(r) * left_stride);
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) acc[r][n] = Op::add(acc[r][n], x, value[n]);
  }
}

// `more`: accumulators begin with what is in `out`, else with +0.
template <int R, int N, class Op, bool more, class Hint>
CALSTACK_INLINE void block(const Product& p, Hint ahead) {
  F32x16 acc[R][N];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) acc[r][n] = more ? F32x16::load(p.out + static_cast<size_t>(r) * p.out_stride + n * 16) : F32x16::zero();
  const uint8_t *left = p.left, *right = p.right;
  const size_t step_bytes = p.lanes * Op::kLaneBytes;
  for (int i = 0; i < p.pairs; ++i, left += Op::kLeftBytes, right += step_bytes) {
    add_step<R, N, Op, 0>(acc, left, p.left_stride, right, p.lanes);
    if constexpr (Op::kSteps == 2) add_step<R, N, Op, 1>(acc, left, p.left_stride, right, p.lanes);
    ahead.touch();
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) acc[r][n].store(p.out + static_cast<size_t>(r) * p.out_stride + n * 16);
}

// `vectors` at most N.
template <int R, int N, class Op, bool more, class Hint>
CALSTACK_INLINE void block_of(int vectors, const Product& p, Hint ahead) {
  if constexpr (N > 1)
    if (vectors < N) return block_of<R, N - 1, Op, more>(vectors, p, ahead);
  block<R, N, Op, more>(p, ahead);
}

// `rows` (1..kRows) left rows against `vectors` vectors of the right side, cut into blocks of nearly equal width.
template <int R, class Op, bool more, class Hint>
void multiply(int rows, int vectors, Product p, Hint ahead) {
  if constexpr (R > 1)
    if (rows < R) return multiply<R - 1, Op, more>(rows, vectors, p, ahead);
  const int blocks = (vectors + kVectors - 1) / kVectors;
  const uint8_t* right = p.right;
  float* out = p.out;
  for (int b = 0; b < blocks; ++b) {
    const int begin = vectors * b / blocks, end = vectors * (b + 1) / blocks;
    p.right = right + static_cast<size_t>(begin) * 16 * (Op::kRowsApart ? sizeof(float) : Op::kLaneBytes);
    p.out = out + begin * 16;
    if (b == 0)
      block_of<R, kVectors, Op, more>(end - begin, p, ahead);
    else
      block_of<R, kVectors, Op, more>(end - begin, p, NoHint{});
  }
}

}  // namespace
}  // namespace CALSTACK_ISA
}  // namespace calstack
