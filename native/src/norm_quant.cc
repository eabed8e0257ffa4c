// Normalisation of rows, and their quantisation for int8 products. Once per instruction set (kernel_parts.h).
#include "kernel_parts.h"
#include "simd/math.h"

namespace calstack {
namespace CALSTACK_ISA {
namespace {

float lane_sum_of_squares(const float* x, int n) {
  F32x16 acc = F32x16::zero();
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    const F32x16 v = F32x16::load(x + i);
    acc = fma(v, v, acc);
  }
  if (i < n) {  // lanes past the end add +0 to sums that are not negative: no change
    const F32x16 v = F32x16::load_first(x + i, n - i);
    acc = fma(v, v, acc);
  }
  return tree_sum(acc);
}

float rms_factor(const float* x, const NormSpec& norm, int n) {
  return 1.0f / __builtin_sqrtf(lane_sum_of_squares(x, n) / (float)n + norm.eps);
}

void norm_row(const float* x, const NormSpec& norm, float* y, int n) {
  const F32x16 r = F32x16::broadcast(rms_factor(x, norm, n));
  int i = 0;
  for (; i + 16 <= n; i += 16) (F32x16::load(x + i) * r * F32x16::load(norm.weight + i)).store(y + i);
  if (i < n) (F32x16::load_first(x + i, n - i) * r * F32x16::load_first(norm.weight + i, n - i)).store_first(y + i, n - i);
}

void norm_rows(const float* x, size_t xs, const NormSpec& norm, float* y, size_t ys, int n, int r0, int r1) {
  for (size_t r = (size_t)r0; r < (size_t)r1; ++r) {
    if (norm.weight) norm_row(x + r * xs, norm, y + r * ys, n);
    else if (x + r * xs != y + r * ys) std::memmove(y + r * ys, x + r * xs, (size_t)n * sizeof(float));
  }
}

// 1 / rms of R rows: their sums are independent, so that one hides the latency of the other.
template <int R> void rms_factors(const float* x, size_t xs, const NormSpec& norm, int n, float* factor) {
  F32x16 acc[R];
  for (auto& a : acc) a = F32x16::zero();
  for (int i = 0; i < n; i += 16)
    for (int r = 0; r < R; ++r) {
      const F32x16 v = F32x16::load(x + (size_t)r * xs + i);
      acc[r] = fma(v, v, acc[r]);
    }
  for (int r = 0; r < R; ++r) factor[r] = 1.0f / __builtin_sqrtf(tree_sum(acc[r]) / (float)n + norm.eps);
}

// Sixteen groups of 16 * V values, of one row or of several: their scales are divided together.
template <int V, bool normed> struct Sixteen {
  const float* x[16];
  const float* weight[16];
  float factor[16];
  int8_t* codes[16];
  alignas(64) float normed_x[normed ? 16 : 1][16 * V];

  // Value v of group i the first time, when the norm is applied, and again.
  CALSTACK_INLINE F32x16 first_value(int i, int v) {
    const F32x16 y = F32x16::load(x[i] + 16 * v);
    if (!normed) return y;
    const F32x16 scaled = y * F32x16::broadcast(factor[i]) * F32x16::load(weight[i] + 16 * v);
    scaled.store(normed_x[i] + 16 * v);
    return scaled;
  }
  CALSTACK_INLINE F32x16 value(int i, int v) const { return F32x16::load((normed ? normed_x[i] : x[i]) + 16 * v); }

  CALSTACK_INLINE F32x16 largest(int n) {
    F32x16 top[16];
    for (int i = 0; i < 16; ++i) top[i] = F32x16::zero();
    for (int i = 0; i < n; ++i)
      for (int v = 0; v < V; ++v) top[i] = max(top[i], abs(first_value(i, v)));
    return max_of_each(top);
  }

  // Writes the codes; gives their sums.
  CALSTACK_INLINE I32x16 encode(const float (&inv)[16], int n) const {
    I32x16 total[16];
    for (int i = 0; i < 16; ++i) total[i] = I32x16::zero();
    for (int i = 0; i < n; ++i)
      for (int v = 0; v < V; ++v) {
        const I32x16 code = to_i32(value(i, v) * F32x16::broadcast(inv[i]));
        store_i8(code, codes[i] + 16 * v);
        total[i] = total[i] + code;
      }
    return sum_of_each(total);
  }

  // The first n of the sixteen.
  CALSTACK_INLINE void quantise(int n, float* scale, float* asum, int32_t* isum) {
    const F32x16 amax = largest(n), full = F32x16::broadcast(127.0f), none = F32x16::zero();
    const Mask16 zero = less(amax, F32x16::broadcast(0x1p-100f));
    alignas(64) float inv[16];
    select(zero, none, full / amax).store(inv);
    const F32x16 s = select(zero, none, amax / full);
    const I32x16 sums = encode(inv, n);
    s.store_first(scale, n);
    (s * to_f32(sums)).store_first(asum, n);
    sums.store_first(isum, n);
  }
};

constexpr int kRowsAtOnce = 4;

// Up to kRowsAtOnce rows from row r0 on.
template <int V, bool normed> void quant_few(const float* x, size_t xs, const NormSpec& norm, const QuantRows& out, size_t r0, int rows) {
  const int groups = out.k / out.group, total = rows * groups;
  float factor[kRowsAtOnce] = {};
  if (normed && rows == kRowsAtOnce) rms_factors<kRowsAtOnce>(x + r0 * xs, xs, norm, out.k, factor);
  else if (normed)
    for (int r = 0; r < rows; ++r) rms_factors<1>(x + (r0 + (size_t)r) * xs, xs, norm, out.k, factor + r);
  Sixteen<V, normed> batch;
  int row = 0, g = 0;
  for (int at = 0; at < total; at += 16) {
    const int n = total - at < 16 ? total - at : 16;
    for (int i = 0; i < n; ++i) {
      const size_t r = r0 + (size_t)row, k = (size_t)g * 16 * V;
      batch.x[i] = x + r * xs + k;
      batch.codes[i] = out.codes + r * (size_t)out.k + k;
      batch.weight[i] = normed ? norm.weight + k : nullptr;
      batch.factor[i] = factor[row];
      if (++g == groups) g = 0, ++row;
    }
    const size_t first = r0 * (size_t)groups + (size_t)at;  // groups of all rows lie one behind the other
    batch.quantise(n, out.scale + first, out.asum + first, out.isum + first);
  }
}

template <int V, bool normed>
void quant_rows_of(const float* x, size_t xs, const NormSpec& norm, const QuantRows& out, int r0, int r1) {
  for (int r = r0; r < r1; r += kRowsAtOnce)
    quant_few<V, normed>(x, xs, norm, out, (size_t)r, r1 - r < kRowsAtOnce ? r1 - r : kRowsAtOnce);
}

template <bool normed> auto quant_rows_for(int group) {
  if (group == 32) return quant_rows_of<2, normed>;
  return group == 64 ? quant_rows_of<4, normed> : quant_rows_of<8, normed>;
}

void quant_rows(const float* x, size_t xs, const NormSpec& norm, const QuantRows& out, int r0, int r1) {
  const auto run = norm.weight ? quant_rows_for<true>(out.group) : quant_rows_for<false>(out.group);
  run(x, xs, norm, out, r0, r1);
}

}  // namespace

void fill_norm_quant(KernelTable& t) {
  t.quant_rows = quant_rows;
  t.norm_rows = norm_rows;
}

}  // namespace CALSTACK_ISA
}  // namespace calstack
