// Sixteen f64 accumulators for lane sums of f32 values in f64.
#pragma once
#include "simd/simd.h"

namespace calstack {
namespace CALSTACK_ISA {

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
struct F64Lanes {
  __m512d lo = _mm512_setzero_pd(), hi = _mm512_setzero_pd();
  CALSTACK_INLINE void add(F32x16 x) {
    lo = _mm512_add_pd(lo, _mm512_cvtps_pd(_mm512_castps512_ps256(x.v)));
    hi = _mm512_add_pd(hi, _mm512_cvtps_pd(_mm512_extractf32x8_ps(x.v, 1)));
  }
  CALSTACK_INLINE void store(double* p) const {
    _mm512_storeu_pd(p, lo);
    _mm512_storeu_pd(p + 8, hi);
  }
};
#elif defined(__AVX2__) && defined(__FMA__)
struct F64Lanes {
  __m256d v[4] = {_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd()};
  CALSTACK_INLINE void add(F32x16 x) {
    v[0] = _mm256_add_pd(v[0], _mm256_cvtps_pd(_mm256_castps256_ps128(x.lo)));
    v[1] = _mm256_add_pd(v[1], _mm256_cvtps_pd(_mm256_extractf128_ps(x.lo, 1)));
    v[2] = _mm256_add_pd(v[2], _mm256_cvtps_pd(_mm256_castps256_ps128(x.hi)));
    v[3] = _mm256_add_pd(v[3], _mm256_cvtps_pd(_mm256_extractf128_ps(x.hi, 1)));
  }
  CALSTACK_INLINE void store(double* p) const {
    for (int i = 0; i < 4; ++i) _mm256_storeu_pd(p + 4 * i, v[i]);
  }
};
#else
struct F64Lanes {
  double v[16] = {};
  CALSTACK_INLINE void add(F32x16 x) {
    for (int i = 0; i < 16; ++i) v[i] += (double)x.v[i];
  }
  CALSTACK_INLINE void store(double* p) const { std::memcpy(p, v, sizeof v); }
};
#endif

// The tree of a lane sum.
CALSTACK_INLINE double tree_sum(const F64Lanes& lanes) {
  double a[16];
  lanes.store(a);
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) a[i] += a[i + half];
  return a[0];
}

}  // namespace CALSTACK_ISA
}  // namespace calstack
