// exp, sigmoid, silu and gelu of sixteen lanes, as docs/concepts/numerics.md writes them.
#pragma once
#include "simd/simd.h"

namespace calstack {
namespace CALSTACK_ISA {

CALSTACK_INLINE F32x16 exp(F32x16 x) {
  const F32x16 low = F32x16::broadcast(-87.0f);
  const Mask16 vanishes = less(x, low);
  x = min(F32x16::broadcast(88.0f), max(low, x));  // this order lets a NaN through
  const F32x16 n = rint(x * F32x16::broadcast(0x1.715476p+0f));
  F32x16 r = fma(n, F32x16::broadcast(-0x1.62e4p-1f), x);
  r = fma(n, F32x16::broadcast(-0x1.7f7d1cp-20f), r);
  F32x16 p = F32x16::broadcast(0x1.6850e4p-10f);
  p = fma(p, r, F32x16::broadcast(0x1.123bccp-7f));
  p = fma(p, r, F32x16::broadcast(0x1.555b98p-5f));
  p = fma(p, r, F32x16::broadcast(0x1.55548ep-3f));
  p = fma(p, r, F32x16::broadcast(0x1.fffff8p-2f));
  p = fma(p, r, F32x16::broadcast(1.0f));
  p = fma(p, r, F32x16::broadcast(1.0f));
  const F32x16 y = as_f32(as_i32(p) + shift_left<23>(to_i32(n)));
  return select(vanishes, F32x16::zero(), y);
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
