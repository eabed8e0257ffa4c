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

// One group of 16 * V values, y = (x * r) * w or x: its codes, scale and sums.
template <int V, bool normed> struct GroupQuantiser {
  const float* x;
  const float* weight;
  F32x16 r;

  CALSTACK_INLINE F32x16 value(int k) const {
    const F32x16 v = F32x16::load(x + k);
    return normed ? v * r * F32x16::load(weight + k) : v;
  }

  CALSTACK_INLINE void operator()(int g, int8_t* codes, float& scale, float& asum, int32_t& isum) const {
    const int k0 = g * 16 * V;
    F32x16 y[V];
    for (int i = 0; i < V; ++i) y[i] = value(k0 + 16 * i);
    F32x16 top = abs(y[0]);
    for (int i = 1; i < V; ++i) top = max(top, abs(y[i]));
    const float amax = max_lane(top);
    const bool zero = amax < 0x1p-100f;
    const F32x16 inv = F32x16::broadcast(zero ? 0.0f : 127.0f / amax);
    I32x16 total = I32x16::zero();
    for (int i = 0; i < V; ++i) {
      const I32x16 code = to_i32(y[i] * inv);
      store_i8(code, codes + k0 + 16 * i);
      total = total + code;
    }
    scale = zero ? 0.0f : amax / 127.0f;
    isum = sum_lanes(total);
    asum = scale * (float)isum;
  }
};

template <int V, bool normed>
void quant_rows_of(const float* x, size_t xs, const NormSpec& norm, const QuantRows& out, int r0, int r1) {
  const int groups = out.k / out.group;
  for (size_t r = (size_t)r0; r < (size_t)r1; ++r) {
    const float* row = x + r * xs;
    const float factor = normed ? rms_factor(row, norm, out.k) : 1.0f;
    const GroupQuantiser<V, normed> quantise{row, norm.weight, F32x16::broadcast(factor)};
    int8_t* codes = out.codes + r * (size_t)out.k;
    const size_t at = r * (size_t)groups;
    for (int g = 0; g < groups; ++g) quantise(g, codes, out.scale[at + g], out.asum[at + g], out.isum[at + g]);
  }
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
