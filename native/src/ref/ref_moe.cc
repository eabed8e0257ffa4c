// Mixture of experts, one value at a time: docs/concepts/numerics.md, "Mixture of experts".
#include "kernel_parts.h"
#include "ref/ref_math.h"

namespace calstack {
namespace reference {
namespace {

// The expert that comes next: highest z, lower index first, not taken yet.
int next_expert(const float* z, int experts, const bool* taken) {
  int best = -1;
  for (int e = 0; e < experts; ++e)
    if (!taken[e] && (best < 0 || z[e] > z[best])) best = e;
  return best;
}

void moe_route(const float* z, int experts, int top_k, bool renormalise, float* weights, int32_t* chosen) {
  bool taken[kMostExperts] = {};
  for (int j = 0; j < top_k; ++j) {
    chosen[j] = next_expert(z, experts, taken);
    taken[chosen[j]] = true;
  }
  const float highest = z[chosen[0]];
  float sum = 0.0f, acc[16] = {};
  for (int j = 0; j < top_k; ++j) {
    weights[j] = exp_f32(z[chosen[j]] - highest);
    sum += weights[j];
  }
  if (!renormalise) {
    for (int e = 0; e < experts; ++e) acc[e % 16] += exp_f32(z[e] - highest);
    sum = lane_tree(acc);
  }
  for (int j = 0; j < top_k; ++j) weights[j] = weights[j] / sum;
}

void moe_combine(const float* weights, const float* const* parts, int top_k, float* out, int n) {
  for (int i = 0; i < n; ++i) {
    float acc = 0.0f;
    for (int j = 0; j < top_k; ++j) acc = std::fma(weights[j], parts[j][i], acc);
    out[i] = out[i] + acc;
  }
}

}  // namespace

void fill_moe(KernelTable& t) {
  t.moe_route = moe_route;
  t.moe_combine = moe_combine;
}

}  // namespace reference
}  // namespace calstack
