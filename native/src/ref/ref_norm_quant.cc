// Normalisation and activation quantisation: the scalar reference.
#include "kernel_parts.h"
#include "ref/ref_math.h"

namespace calstack {
namespace reference {
namespace {

// y_i of one row: (x_i * r) * w_i, or x_i without a norm.
struct NormedRow {
  const float* x;
  const float* weight;
  float r;
  NormedRow(const float* row, const NormSpec& norm, int n)
      : x(row), weight(norm.weight), r(norm.weight ? rms_factor(row, n, norm.eps) : 1.0f) {}
  float operator[](int i) const { return weight ? (x[i] * r) * weight[i] : x[i]; }
};

void norm_rows(const float* x, size_t xs, const NormSpec& norm, float* y, size_t ys, int n, int r0, int r1) {
  for (int r = r0; r < r1; ++r) {
    const NormedRow row(x + (size_t)r * xs, norm, n);
    for (int i = 0; i < n; ++i) y[(size_t)r * ys + i] = row[i];
  }
}

// Group `g` of row `r`.
void quant_group(const NormedRow& row, const QuantRows& out, int r, int g) {
  const int k0 = g * out.group, k1 = k0 + out.group;
  float amax = 0.0f;
  for (int k = k0; k < k1; ++k) amax = std::fmax(amax, std::fabs(row[k]));
  const bool zero = amax < 0x1p-100f;
  const float s = zero ? 0.0f : amax / 127.0f, inv = zero ? 0.0f : 127.0f / amax;
  int32_t isum = 0;
  for (int k = k0; k < k1; ++k) {
    const int code = zero ? 0 : (int)std::rint(row[k] * inv);
    out.codes[(size_t)r * out.k + k] = (int8_t)code;
    isum += code;
  }
  const size_t at = (size_t)r * (out.k / out.group) + g;
  out.scale[at] = s;
  out.isum[at] = isum;
  out.asum[at] = s * (float)isum;
}

void quant_rows(const float* x, size_t xs, const NormSpec& norm, const QuantRows& out, int r0, int r1) {
  for (int r = r0; r < r1; ++r) {
    const NormedRow row(x + (size_t)r * xs, norm, out.k);
    for (int g = 0; g < out.k / out.group; ++g) quant_group(row, out, r, g);
  }
}

}  // namespace

void fill_norm_quant(KernelTable& t) {
  t.norm_rows = norm_rows;
  t.quant_rows = quant_rows;
}

}  // namespace reference
}  // namespace calstack
