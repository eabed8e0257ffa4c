// Layer norm, and one row of a text's rows. Once per instruction set (kernel_parts.h).
#include "kernel_parts.h"
#include "simd/simd.h"

namespace calstack {
namespace CALSTACK_ISA {
namespace {

// f(first element, elements): whole vectors, then the rest.
template <class F>
CALSTACK_INLINE void each_vector(int n, F f) {
  int i = 0;
  for (; i + 16 <= n; i += 16) f(i, 16);
  if (i < n) f(i, n - i);
}

// Lanes past the end add +0 to sums that are never -0: no change.
float lane_sum(const float* x, int n) {
  F32x16 acc = F32x16::zero();
  each_vector(n, [&](int i, int lanes) { acc = acc + F32x16::load_first(x + i, lanes); });
  return tree_sum(acc);
}

float lane_sum_of_squares(const float* x, int n) {
  F32x16 acc = F32x16::zero();
  each_vector(n, [&](int i, int lanes) {
    const F32x16 v = F32x16::load_first(x + i, lanes);
    acc = fma(v, v, acc);
  });
  return tree_sum(acc);
}

void layer_norm_row(const float* x, const float* weight, const float* bias, float eps, float* y, int n) {
  const F32x16 mean = F32x16::broadcast(lane_sum(x, n) / (float)n);
  each_vector(n, [&](int i, int lanes) { (F32x16::load_first(x + i, lanes) - mean).store_first(y + i, lanes); });
  const F32x16 factor = F32x16::broadcast(1.0f / __builtin_sqrtf(lane_sum_of_squares(y, n) / (float)n + eps));
  each_vector(n, [&](int i, int lanes) {
    const F32x16 scaled = F32x16::load_first(y + i, lanes) * factor;
    fma(scaled, F32x16::load_first(weight + i, lanes), F32x16::load_first(bias + i, lanes)).store_first(y + i, lanes);
  });
}

void layer_norm_rows(const float* x, size_t xs, const float* weight, const float* bias, float eps, float* y, size_t ys, int n, int r0, int r1) {
  for (size_t r = (size_t)r0; r < (size_t)r1; ++r) layer_norm_row(x + r * xs, weight, bias, eps, y + r * ys, n);
}

void pool_rows(const float* x, size_t xs, int rows, int n, Pooling how, bool normalise, float* out) {
  const F32x16 count = F32x16::broadcast((float)rows);
  each_vector(n, [&](int i, int lanes) {
    if (how == Pooling::cls) return F32x16::load_first(x + i, lanes).store_first(out + i, lanes);
    F32x16 acc = F32x16::zero();
    for (size_t r = 0; r < (size_t)rows; ++r) acc = acc + F32x16::load_first(x + r * xs + i, lanes);
    (acc / count).store_first(out + i, lanes);
  });
  if (!normalise) return;
  const float length = __builtin_sqrtf(lane_sum_of_squares(out, n)), least = 0x1.197998p-40f;
  const F32x16 by = F32x16::broadcast(length > least ? length : least);
  each_vector(n, [&](int i, int lanes) { (F32x16::load_first(out + i, lanes) / by).store_first(out + i, lanes); });
}

}  // namespace

void fill_encoder(KernelTable& t) {
  t.layer_norm_rows = layer_norm_rows;
  t.pool_rows = pool_rows;
}

}  // namespace CALSTACK_ISA
}  // namespace calstack
