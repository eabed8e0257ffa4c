// The sixteen lanes as arrays: plain C++ for any machine. Included by simd.h only.
#pragma once
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "half.h"

namespace calstack {
namespace CALSTACK_ISA {

constexpr int kVectorRegisters = 8;  // as many as still keep the compiler from spilling everything

struct Mask16 {
  bool v[16];
};

struct I32x16 {
  int32_t v[16];
  static CALSTACK_INLINE I32x16 broadcast(int32_t x) {
    I32x16 r;
    for (int i = 0; i < 16; ++i) r.v[i] = x;
    return r;
  }
  static CALSTACK_INLINE I32x16 zero() { return broadcast(0); }
  static CALSTACK_INLINE I32x16 load(const void* p) {
    I32x16 r;
    std::memcpy(r.v, p, 64);
    return r;
  }
  CALSTACK_INLINE void store(void* p) const { std::memcpy(p, v, 64); }
  CALSTACK_INLINE void store_first(int32_t* p, int n) const {
    for (int i = 0; i < n; ++i) p[i] = v[i];
  }
};

struct F32x16 {
  float v[16];
  static CALSTACK_INLINE F32x16 broadcast(float x) {
    F32x16 r;
    for (int i = 0; i < 16; ++i) r.v[i] = x;
    return r;
  }
  static CALSTACK_INLINE F32x16 zero() { return broadcast(0.0f); }
  static CALSTACK_INLINE F32x16 load(const float* p) {
    F32x16 r;
    std::memcpy(r.v, p, 64);
    return r;
  }
  static CALSTACK_INLINE F32x16 load_first(const float* p, int n) {
    F32x16 r = zero();
    for (int i = 0; i < n; ++i) r.v[i] = p[i];
    return r;
  }
  static CALSTACK_INLINE F32x16 load_f16(const void* p) { return load_halves<f16_to_f32>(p); }
  static CALSTACK_INLINE F32x16 load_bf16(const void* p) { return load_halves<bf16_to_f32>(p); }
  CALSTACK_INLINE void store(float* p) const { std::memcpy(p, v, 64); }
  CALSTACK_INLINE void store_first(float* p, int n) const {
    for (int i = 0; i < n; ++i) p[i] = v[i];
  }

 private:
  template <float (*widen)(uint16_t)> static CALSTACK_INLINE F32x16 load_halves(const void* p) {
    uint16_t in[16];
    std::memcpy(in, p, 32);
    F32x16 r;
    for (int i = 0; i < 16; ++i) r.v[i] = widen(in[i]);
    return r;
  }
};

// r[i] = f(i) in every lane.
template <class V, class F> CALSTACK_INLINE V lanes(F f) {
  V r;
  for (int i = 0; i < 16; ++i) r.v[i] = f(i);
  return r;
}

CALSTACK_INLINE F32x16 operator+(F32x16 a, F32x16 b) { return lanes<F32x16>([&](int i) { return a.v[i] + b.v[i]; }); }
CALSTACK_INLINE F32x16 operator-(F32x16 a, F32x16 b) { return lanes<F32x16>([&](int i) { return a.v[i] - b.v[i]; }); }
CALSTACK_INLINE F32x16 operator*(F32x16 a, F32x16 b) { return lanes<F32x16>([&](int i) { return a.v[i] * b.v[i]; }); }
CALSTACK_INLINE F32x16 operator/(F32x16 a, F32x16 b) { return lanes<F32x16>([&](int i) { return a.v[i] / b.v[i]; }); }
CALSTACK_INLINE F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  return lanes<F32x16>([&](int i) { return __builtin_fmaf(a.v[i], b.v[i], c.v[i]); });
}
CALSTACK_INLINE F32x16 max(F32x16 a, F32x16 b) { return lanes<F32x16>([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
CALSTACK_INLINE F32x16 min(F32x16 a, F32x16 b) { return lanes<F32x16>([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
CALSTACK_INLINE F32x16 abs(F32x16 a) { return lanes<F32x16>([&](int i) { return __builtin_fabsf(a.v[i]); }); }
CALSTACK_INLINE F32x16 negate(F32x16 a) { return lanes<F32x16>([&](int i) { return -a.v[i]; }); }
CALSTACK_INLINE F32x16 rint(F32x16 a) { return lanes<F32x16>([&](int i) { return __builtin_rintf(a.v[i]); }); }
CALSTACK_INLINE F32x16 sqrt(F32x16 a) { return lanes<F32x16>([&](int i) { return __builtin_sqrtf(a.v[i]); }); }

CALSTACK_INLINE Mask16 less(F32x16 a, F32x16 b) { return lanes<Mask16>([&](int i) { return a.v[i] < b.v[i]; }); }
CALSTACK_INLINE Mask16 less(I32x16 a, I32x16 b) { return lanes<Mask16>([&](int i) { return a.v[i] < b.v[i]; }); }
CALSTACK_INLINE Mask16 first_lanes(int n) { return lanes<Mask16>([&](int i) { return i < n; }); }
CALSTACK_INLINE F32x16 select(Mask16 m, F32x16 yes, F32x16 no) {
  return lanes<F32x16>([&](int i) { return m.v[i] ? yes.v[i] : no.v[i]; });
}
CALSTACK_INLINE uint32_t bits(Mask16 m) {
  uint32_t r = 0;
  for (int i = 0; i < 16; ++i) r |= (uint32_t)m.v[i] << i;
  return r;
}

// The tree of a lane sum.
CALSTACK_INLINE float tree_sum(F32x16 a) {
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) a.v[i] += a.v[i + half];
  return a.v[0];
}
CALSTACK_INLINE float max_lane(F32x16 a) {
  float m = a.v[0];
  for (int i = 1; i < 16; ++i) m = a.v[i] > m ? a.v[i] : m;
  return m;
}

CALSTACK_INLINE I32x16 operator+(I32x16 a, I32x16 b) { return lanes<I32x16>([&](int i) { return a.v[i] + b.v[i]; }); }
CALSTACK_INLINE I32x16 operator-(I32x16 a, I32x16 b) { return lanes<I32x16>([&](int i) { return a.v[i] - b.v[i]; }); }
CALSTACK_INLINE I32x16 operator&(I32x16 a, I32x16 b) { return lanes<I32x16>([&](int i) { return a.v[i] & b.v[i]; }); }
template <int n> CALSTACK_INLINE I32x16 shift_left(I32x16 a) {
  return lanes<I32x16>([&](int i) { return (int32_t)((uint32_t)a.v[i] << n); });
}
template <int n> CALSTACK_INLINE I32x16 shift_right(I32x16 a) {  // logical
  return lanes<I32x16>([&](int i) { return (int32_t)((uint32_t)a.v[i] >> n); });
}
CALSTACK_INLINE int32_t sum_lanes(I32x16 a) {
  int32_t s = 0;
  for (int i = 0; i < 16; ++i) s += a.v[i];
  return s;
}

// Lane i = the largest lane of v[i].
CALSTACK_INLINE F32x16 max_of_each(const F32x16 (&v)[16]) {
  float m[16];
  for (int i = 0; i < 16; ++i) m[i] = max_lane(v[i]);
  return F32x16::load(m);
}
// Lane i = the sum of the lanes of v[i].
CALSTACK_INLINE I32x16 sum_of_each(const I32x16 (&v)[16]) {
  int32_t s[16];
  for (int i = 0; i < 16; ++i) s[i] = sum_lanes(v[i]);
  return I32x16::load(s);
}

CALSTACK_INLINE F32x16 to_f32(I32x16 a) { return lanes<F32x16>([&](int i) { return (float)a.v[i]; }); }
CALSTACK_INLINE I32x16 to_i32(F32x16 a) { return lanes<I32x16>([&](int i) { return (int32_t)__builtin_rintf(a.v[i]); }); }
CALSTACK_INLINE I32x16 as_i32(F32x16 a) {
  I32x16 r;
  std::memcpy(r.v, a.v, 64);
  return r;
}
CALSTACK_INLINE F32x16 as_f32(I32x16 a) {
  F32x16 r;
  std::memcpy(r.v, a.v, 64);
  return r;
}
// The low byte of each lane.
CALSTACK_INLINE void store_i8(I32x16 a, int8_t* p) {
  for (int i = 0; i < 16; ++i) p[i] = (int8_t)a.v[i];
}

// Lanes 2 i and 2 i + 1 change places.
CALSTACK_INLINE F32x16 swap_neighbours(F32x16 a) { return lanes<F32x16>([&](int i) { return a.v[i ^ 1]; }); }
// The low (0) or high (1) signed byte of sixteen pairs, as f32.
template <int byte> CALSTACK_INLINE F32x16 code_of_pair(const void* p) {
  int8_t in[32];
  std::memcpy(in, p, 32);
  return lanes<F32x16>([&](int i) { return (float)in[2 * i + byte]; });
}

// Low and high nibbles of every byte.
CALSTACK_INLINE I32x16 low_nibbles(I32x16 a) { return a & I32x16::broadcast(0x0f0f0f0f); }
CALSTACK_INLINE I32x16 high_nibbles(I32x16 a) { return shift_right<4>(a) & I32x16::broadcast(0x0f0f0f0f); }

// acc + the dot product of four unsigned and four signed bytes per lane. `small`: every unsigned byte is below 16.
#if defined(__SSE2__)
// Part of every x86-64: bytes 0, 2 and 1, 3 of each lane as pairs of 16-bit factors.
template <bool small> CALSTACK_INLINE I32x16 dot4(I32x16 acc, I32x16 u8, I32x16 s8) {
  const __m128i low = _mm_set1_epi16(255);
  for (int i = 0; i < 16; i += 4) {
    const __m128i u = _mm_loadu_si128((const __m128i*)(u8.v + i)), s = _mm_loadu_si128((const __m128i*)(s8.v + i));
    const __m128i even = _mm_madd_epi16(_mm_and_si128(u, low), _mm_srai_epi16(_mm_slli_epi16(s, 8), 8));
    const __m128i odd = _mm_madd_epi16(_mm_srli_epi16(u, 8), _mm_srai_epi16(s, 8));
    const __m128i sum = _mm_add_epi32(_mm_loadu_si128((const __m128i*)(acc.v + i)), _mm_add_epi32(even, odd));
    _mm_storeu_si128((__m128i*)(acc.v + i), sum);
  }
  return acc;
}
#else
template <bool small> CALSTACK_INLINE I32x16 dot4(I32x16 acc, I32x16 u8, I32x16 s8) {
  uint8_t u[64];
  int8_t s[64];
  std::memcpy(u, u8.v, 64);
  std::memcpy(s, s8.v, 64);
  for (int i = 0; i < 64; ++i) acc.v[i / 4] += u[i] * s[i];
  return acc;
}
#endif

CALSTACK_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }

}  // namespace CALSTACK_ISA
}  // namespace calstack
