// The sixteen lanes as two ymm. Included by simd.h only.
#pragma once
#include <immintrin.h>

namespace calstack {
namespace CALSTACK_ISA {

constexpr int kVectorRegisters = 8;  // of sixteen lanes

struct Mask16 {
  __m256 lo, hi;
};

// Lanes [from, from + 8) whose index is below n, as all-ones integers.
CALSTACK_INLINE __m256i lanes_below(int n, int from) {
  const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n - from), index);
}

struct I32x16 {
  __m256i lo, hi;
  static CALSTACK_INLINE I32x16 zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  static CALSTACK_INLINE I32x16 broadcast(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
  static CALSTACK_INLINE I32x16 load(const void* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
  }
  CALSTACK_INLINE void store(void* p) const {
    _mm256_storeu_si256((__m256i*)p, lo);
    _mm256_storeu_si256((__m256i*)p + 1, hi);
  }
  CALSTACK_INLINE void store_first(int32_t* p, int n) const {
    _mm256_maskstore_epi32(p, lanes_below(n, 0), lo);
    _mm256_maskstore_epi32(p + 8, lanes_below(n, 8), hi);
  }
};

struct F32x16 {
  __m256 lo, hi;
  static CALSTACK_INLINE F32x16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static CALSTACK_INLINE F32x16 broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static CALSTACK_INLINE F32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static CALSTACK_INLINE F32x16 load_first(const float* p, int n) {
    return {_mm256_maskload_ps(p, lanes_below(n, 0)), _mm256_maskload_ps(p + 8, lanes_below(n, 8))};
  }
  static CALSTACK_INLINE F32x16 load_f16(const void* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p + 1))};
  }
  static CALSTACK_INLINE F32x16 load_bf16(const void* p) {
    const __m256i a = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    const __m256i b = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p + 1));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
  }
  CALSTACK_INLINE void store(float* p) const {
    _mm256_storeu_ps(p, lo);
    _mm256_storeu_ps(p + 8, hi);
  }
  CALSTACK_INLINE void store_first(float* p, int n) const {
    _mm256_maskstore_ps(p, lanes_below(n, 0), lo);
    _mm256_maskstore_ps(p + 8, lanes_below(n, 8), hi);
  }
};

CALSTACK_INLINE F32x16 operator+(F32x16 a, F32x16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
CALSTACK_INLINE F32x16 operator-(F32x16 a, F32x16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
CALSTACK_INLINE F32x16 operator*(F32x16 a, F32x16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
CALSTACK_INLINE F32x16 operator/(F32x16 a, F32x16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
CALSTACK_INLINE F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
CALSTACK_INLINE F32x16 max(F32x16 a, F32x16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
CALSTACK_INLINE F32x16 min(F32x16 a, F32x16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
CALSTACK_INLINE F32x16 abs(F32x16 a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
CALSTACK_INLINE F32x16 negate(F32x16 a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_xor_ps(a.lo, sign), _mm256_xor_ps(a.hi, sign)};
}
CALSTACK_INLINE F32x16 rint(F32x16 a) {
  constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, nearest), _mm256_round_ps(a.hi, nearest)};
}
CALSTACK_INLINE F32x16 sqrt(F32x16 a) { return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }

CALSTACK_INLINE Mask16 less(F32x16 a, F32x16 b) {
  return {_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)};
}
CALSTACK_INLINE Mask16 less(I32x16 a, I32x16 b) {
  return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(b.lo, a.lo)), _mm256_castsi256_ps(_mm256_cmpgt_epi32(b.hi, a.hi))};
}
CALSTACK_INLINE Mask16 first_lanes(int n) {
  return {_mm256_castsi256_ps(lanes_below(n, 0)), _mm256_castsi256_ps(lanes_below(n, 8))};
}
CALSTACK_INLINE F32x16 select(Mask16 m, F32x16 yes, F32x16 no) {
  return {_mm256_blendv_ps(no.lo, yes.lo, m.lo), _mm256_blendv_ps(no.hi, yes.hi, m.hi)};
}
CALSTACK_INLINE uint32_t bits(Mask16 m) {
  return (uint32_t)_mm256_movemask_ps(m.lo) | (uint32_t)_mm256_movemask_ps(m.hi) << 8;
}

// The tree of a lane sum.
CALSTACK_INLINE float tree_sum(F32x16 a) {
  const __m256 y = _mm256_add_ps(a.lo, a.hi);
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
CALSTACK_INLINE float max_lane(F32x16 a) {
  const __m256 y = _mm256_max_ps(a.lo, a.hi);
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

CALSTACK_INLINE I32x16 operator+(I32x16 a, I32x16 b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
CALSTACK_INLINE I32x16 operator-(I32x16 a, I32x16 b) { return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }
CALSTACK_INLINE I32x16 operator&(I32x16 a, I32x16 b) { return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
template <int n> CALSTACK_INLINE I32x16 shift_left(I32x16 a) { return {_mm256_slli_epi32(a.lo, n), _mm256_slli_epi32(a.hi, n)}; }
template <int n> CALSTACK_INLINE I32x16 shift_right(I32x16 a) {  // logical
  return {_mm256_srli_epi32(a.lo, n), _mm256_srli_epi32(a.hi, n)};
}
CALSTACK_INLINE int32_t sum_lanes(I32x16 a) {
  const __m256i y = _mm256_add_epi32(a.lo, a.hi);
  __m128i x = _mm_add_epi32(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1));
  x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32(x, 0xb1)));
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

CALSTACK_INLINE F32x16 to_f32(I32x16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
CALSTACK_INLINE I32x16 to_i32(F32x16 a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
CALSTACK_INLINE I32x16 as_i32(F32x16 a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
CALSTACK_INLINE F32x16 as_f32(I32x16 a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
// The low byte of each lane.
CALSTACK_INLINE void store_i8(I32x16 a, int8_t* p) {
  alignas(32) int32_t lanes[16];
  a.store(lanes);
  for (int i = 0; i < 16; ++i) p[i] = (int8_t)lanes[i];
}

// Lanes 2 i and 2 i + 1 change places.
CALSTACK_INLINE F32x16 swap_neighbours(F32x16 a) { return {_mm256_permute_ps(a.lo, 0xb1), _mm256_permute_ps(a.hi, 0xb1)}; }
// The low (0) or high (1) signed byte of sixteen pairs, as f32.
template <int byte> CALSTACK_INLINE F32x16 code_of_pair(const void* p) {
  const auto half = [](__m128i pairs) {
    const __m256i wide = _mm256_cvtepi16_epi32(byte == 1 ? pairs : _mm_slli_epi16(pairs, 8));
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(wide, 8));
  };
  return {half(_mm_loadu_si128((const __m128i*)p)), half(_mm_loadu_si128((const __m128i*)p + 1))};
}

// Low and high nibbles of every byte.
CALSTACK_INLINE I32x16 low_nibbles(I32x16 a) {
  const __m256i m = _mm256_set1_epi8(15);
  return {_mm256_and_si256(a.lo, m), _mm256_and_si256(a.hi, m)};
}
CALSTACK_INLINE I32x16 high_nibbles(I32x16 a) {
  const __m256i m = _mm256_set1_epi8(15);
  return {_mm256_and_si256(_mm256_srli_epi16(a.lo, 4), m), _mm256_and_si256(_mm256_srli_epi16(a.hi, 4), m)};
}

#if defined(__AVXVNNI__)
template <bool small> CALSTACK_INLINE __m256i dot4_half(__m256i acc, __m256i u8, __m256i s8) {
  return _mm256_dpbusd_avx_epi32(acc, u8, s8);
}
#else
// maddubs adds two products in 16 bits and saturates: exact for bytes below 128, so larger ones are split at bit 7.
template <bool small> CALSTACK_INLINE __m256i dot4_half(__m256i acc, __m256i u8, __m256i s8) {
  const __m256i ones = _mm256_set1_epi16(1);
  if (small) return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(u8, s8), ones));
  const __m256i low = _mm256_maddubs_epi16(_mm256_and_si256(u8, _mm256_set1_epi8(127)), s8);
  const __m256i top = _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16(u8, 7), _mm256_set1_epi8(1)), s8);
  acc = _mm256_add_epi32(acc, _mm256_madd_epi16(low, ones));
  return _mm256_add_epi32(acc, _mm256_madd_epi16(top, _mm256_set1_epi16(128)));
}
#endif

// acc + the dot product of four unsigned and four signed bytes per lane. `small`: every unsigned byte is below 16.
template <bool small> CALSTACK_INLINE I32x16 dot4(I32x16 acc, I32x16 u8, I32x16 s8) {
  return {dot4_half<small>(acc.lo, u8.lo, s8.lo), dot4_half<small>(acc.hi, u8.hi, s8.hi)};
}

CALSTACK_INLINE void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }

}  // namespace CALSTACK_ISA
}  // namespace calstack
