// exp, sigmoid, silu and gelu of sixteen lanes, as docs/concepts/numerics.md writes them.
#pragma once
#include "simd/simd.h"

namespace calstack {
namespace CALSTACK_ISA {

// exp of n vectors at once, step by step: a single chain of dependent steps leaves the units idle. `negative`: no value is above 0.
template <int n, bool negative> CALSTACK_INLINE void exp_each(F32x16 (&x)[n]) {
  const float coefficients[] = {0x1.123bccp-7f, 0x1.555b98p-5f, 0x1.55548ep-3f, 0x1.fffff8p-2f, 1.0f, 1.0f};
  const F32x16 low = F32x16::broadcast(-87.0f);
  Mask16 vanishes[n];
  F32x16 k[n], p[n];
#pragma GCC unroll 8
  for (int i = 0; i < n; ++i) {
    vanishes[i] = less(x[i], low);
    x[i] = max(x[i], low);
    if (!negative) x[i] = min(x[i], F32x16::broadcast(88.0f));
  }
#pragma GCC unroll 8
  for (int i = 0; i < n; ++i) k[i] = rint(x[i] * F32x16::broadcast(0x1.715476p+0f));
#pragma GCC unroll 8
  for (int i = 0; i < n; ++i) x[i] = fma(k[i], F32x16::broadcast(-0x1.62e4p-1f), x[i]);
#pragma GCC unroll 8
  for (int i = 0; i < n; ++i) x[i] = fma(k[i], F32x16::broadcast(-0x1.7f7d1cp-20f), x[i]);
#pragma GCC unroll 8
  for (int i = 0; i < n; ++i) p[i] = F32x16::broadcast(0x1.6850e4p-10f);
#pragma GCC unroll 8
  for (int c = 0; c < 6; ++c)
#pragma GCC unroll 8
    for (int i = 0; i < n; ++i) p[i] = fma(p[i], x[i], F32x16::broadcast(coefficients[c]));
#pragma GCC unroll 8
  for (int i = 0; i < n; ++i) x[i] = select(vanishes[i], F32x16::zero(), as_f32(as_i32(p[i]) + shift_left<23>(to_i32(k[i]))));
}

CALSTACK_INLINE F32x16 exp(F32x16 x) {
  F32x16 one[1] = {x};
  exp_each<1, false>(one);
  return one[0];
}

CALSTACK_INLINE F32x16 sigmoid(F32x16 x) {
  const F32x16 one = F32x16::broadcast(1.0f);
  return one / (one + exp(negate(x)));
}

CALSTACK_INLINE F32x16 tanh(F32x16 x) {
  const F32x16 two = F32x16::broadcast(2.0f);
  return fma(two, sigmoid(two * x), F32x16::broadcast(-1.0f));
}

CALSTACK_INLINE F32x16 silu(F32x16 x) { return x * sigmoid(x); }

CALSTACK_INLINE F32x16 gelu_tanh(F32x16 x) {
  const F32x16 cubic = fma(x * x, F32x16::broadcast(0x1.6e4e26p-5f), F32x16::broadcast(1.0f));
  const F32x16 u = x * F32x16::broadcast(0x1.988454p-1f) * cubic;
  return x * sigmoid(u + u);
}

CALSTACK_INLINE F32x16 gelu(F32x16 x) {
  const F32x16 one = F32x16::broadcast(1.0f);
  const F32x16 z = abs(x) * F32x16::broadcast(0x1.6a09e6p-1f);
  const F32x16 t = one / fma(z, F32x16::broadcast(0x1.4f740ap-2f), one);
  F32x16 p = F32x16::broadcast(0x1.0fb844p+0f);
  p = fma(p, t, F32x16::broadcast(-0x1.7401c6p+0f));
  p = fma(p, t, F32x16::broadcast(0x1.6be1c6p+0f));
  p = fma(p, t, F32x16::broadcast(-0x1.23531cp-2f));
  p = fma(p, t, F32x16::broadcast(0x1.04f20cp-2f));
  const F32x16 tail = p * t * exp(negate(z * z)) * F32x16::broadcast(0.5f);
  return x * select(less(x, F32x16::zero()), tail, one - tail);
}

}  // namespace CALSTACK_ISA
}  // namespace calstack
