// Layer norm and pooling: the scalar reference.
#include "kernel_parts.h"
#include "ref/ref_math.h"

namespace calstack {
namespace reference {
namespace {

float lane_sum(const float* x, int n) {
  float acc[16] = {};
  for (int i = 0; i < n; ++i) acc[i % 16] = acc[i % 16] + x[i];
  return lane_tree(acc);
}

void layer_norm_rows(const float* x, size_t xs, const float* weight, const float* bias, float eps, float* y, size_t ys, int n, int r0, int r1) {
  for (int r = r0; r < r1; ++r) {
    const float* row = x + static_cast<size_t>(r) * xs;
    float* to = y + static_cast<size_t>(r) * ys;
    const float mean = lane_sum(row, n) / static_cast<float>(n);
    for (int i = 0; i < n; ++i) to[i] = row[i] - mean;
    const float factor = rms_factor(to, n, eps);
    for (int i = 0; i < n; ++i) to[i] = std::fma(to[i] * factor, weight[i], bias[i]);
  }
}

void pool_rows(const float* x, size_t xs, int rows, int n, Pooling how, bool normalise, float* out) {
  for (int i = 0; i < n; ++i) {
    float acc = 0.0f;
    for (int r = 0; r < rows; ++r) acc = acc + x[static_cast<size_t>(r) * xs + static_cast<size_t>(i)];
    out[i] = how == Pooling::cls ? x[i] : acc / static_cast<float>(rows);
  }
  if (!normalise) return;
  const float length = std::fmax(std::sqrt(lane_sum_of_squares(out, n)), 0x1.197998p-40f);
  for (int i = 0; i < n; ++i) out[i] = out[i] / length;
}

}  // namespace

void fill_encoder(KernelTable& t) {
  t.layer_norm_rows = layer_norm_rows;
  t.pool_rows = pool_rows;
}

}  // namespace reference
}  // namespace calstack
