// Choice of experts and the sum of what they give: docs/concepts/numerics.md, "Mixture of experts". Once per instruction set.
#include "kernel_parts.h"
#include "simd/math.h"

namespace calstack {
namespace CALSTACK_ISA {
namespace {

// Keeps the best so far sorted; most experts lose against the last of them at once. A later one of equal z comes behind. NaN (a fault
// elsewhere) never wins, but every place is filled.
void choose(const float* z, int experts, int top_k, int32_t* chosen) {
  float best[kMostChosen];
  int held = 0;
  for (int e = 0; e < experts; ++e) {
    if (held == top_k && !(z[e] > best[held - 1])) continue;
    int at = held < top_k ? held++ : held - 1;
    for (; at > 0 && z[e] > best[at - 1]; --at) {
      best[at] = best[at - 1];
      chosen[at] = chosen[at - 1];
    }
    best[at] = z[e];
    chosen[at] = e;
  }
}

float sum_of_all(const float* z, int experts, float highest) {
  const F32x16 top = F32x16::broadcast(highest);
  F32x16 sum = F32x16::zero();
  alignas(64) float tail[16];
  for (int e = 0; e < experts; e += 16) {
    const int n = experts - e < 16 ? experts - e : 16;
    const F32x16 p = exp(F32x16::load_first(z + e, n) - top);
    p.store(tail);
    sum = sum + (n == 16 ? p : F32x16::load_first(tail, n));  // +0 in the other lanes changes no sum of positive values
  }
  return tree_sum(sum);
}

void moe_route(const float* z, int experts, int top_k, bool renormalise, float* weights, int32_t* chosen) {
  choose(z, experts, top_k, chosen);
  const float highest = z[chosen[0]];
  alignas(64) float p[kMostChosen];
  for (int j = 0; j < top_k; ++j) p[j] = z[chosen[j]] - highest;
  for (int j = 0; j < top_k; j += 16) {
    const int n = top_k - j < 16 ? top_k - j : 16;
    exp(F32x16::load_first(p + j, n)).store_first(p + j, n);
  }
  float sum = 0.0f;
  for (int j = 0; renormalise && j < top_k; ++j) sum += p[j];
  if (!renormalise) sum = sum_of_all(z, experts, highest);
  for (int j = 0; j < top_k; ++j) weights[j] = p[j] / sum;
}

void moe_combine(const float* weights, const float* const* parts, int top_k, float* out, int n) {
  for (int i = 0; i < n; i += 16) {
    const int lanes = n - i < 16 ? n - i : 16;
    F32x16 acc = F32x16::zero();
    for (int j = 0; j < top_k; ++j) acc = fma(F32x16::broadcast(weights[j]), F32x16::load_first(parts[j] + i, lanes), acc);
    (F32x16::load_first(out + i, lanes) + acc).store_first(out + i, lanes);
  }
}

}  // namespace

void fill_moe(KernelTable& t) {
  t.moe_route = moe_route;
  t.moe_combine = moe_combine;
}

}  // namespace CALSTACK_ISA
}  // namespace calstack
