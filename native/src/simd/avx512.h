// The sixteen lanes as one zmm. Included by simd.h only.
#pragma once
#include <immintrin.h>

namespace calstack {
namespace CALSTACK_ISA {

constexpr int kVectorRegisters = 32;  // of sixteen lanes

struct Mask16 {
  __mmask16 m;
};

struct I32x16 {
  __m512i v;
  static CALSTACK_INLINE I32x16 zero() { return {_mm512_setzero_si512()}; }
  static CALSTACK_INLINE I32x16 broadcast(int32_t x) { return {_mm512_set1_epi32(x)}; }
  static CALSTACK_INLINE I32x16 load(const void* p) { return {_mm512_loadu_si512(p)}; }
  CALSTACK_INLINE void store(void* p) const { _mm512_storeu_si512(p, v); }
  CALSTACK_INLINE void store_first(int32_t* p, int n) const { _mm512_mask_storeu_epi32(p, (__mmask16)((1u << n) - 1), v); }
};

struct F32x16 {
  __m512 v;
  static CALSTACK_INLINE F32x16 zero() { return {_mm512_setzero_ps()}; }
  static CALSTACK_INLINE F32x16 broadcast(float x) { return {_mm512_set1_ps(x)}; }
  static CALSTACK_INLINE F32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static CALSTACK_INLINE F32x16 load_first(const float* p, int n) { return {_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p)}; }
  static CALSTACK_INLINE F32x16 load_f16(const void* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
  static CALSTACK_INLINE F32x16 load_bf16(const void* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
  }
  CALSTACK_INLINE void store(float* p) const { _mm512_storeu_ps(p, v); }
  CALSTACK_INLINE void store_first(float* p, int n) const { _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), v); }
};

CALSTACK_INLINE F32x16 operator+(F32x16 a, F32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
CALSTACK_INLINE F32x16 operator-(F32x16 a, F32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
CALSTACK_INLINE F32x16 operator*(F32x16 a, F32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
CALSTACK_INLINE F32x16 operator/(F32x16 a, F32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
CALSTACK_INLINE F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
CALSTACK_INLINE F32x16 max(F32x16 a, F32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
CALSTACK_INLINE F32x16 min(F32x16 a, F32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
CALSTACK_INLINE F32x16 abs(F32x16 a) { return {_mm512_abs_ps(a.v)}; }
CALSTACK_INLINE F32x16 negate(F32x16 a) { return {_mm512_xor_ps(a.v, _mm512_set1_ps(-0.0f))}; }
CALSTACK_INLINE F32x16 rint(F32x16 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
CALSTACK_INLINE F32x16 sqrt(F32x16 a) { return {_mm512_sqrt_ps(a.v)}; }

CALSTACK_INLINE Mask16 less(F32x16 a, F32x16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
CALSTACK_INLINE Mask16 less(I32x16 a, I32x16 b) { return {_mm512_cmplt_epi32_mask(a.v, b.v)}; }
CALSTACK_INLINE Mask16 first_lanes(int n) { return {(__mmask16)((1u << n) - 1)}; }
CALSTACK_INLINE F32x16 select(Mask16 m, F32x16 yes, F32x16 no) { return {_mm512_mask_blend_ps(m.m, no.v, yes.v)}; }
CALSTACK_INLINE uint32_t bits(Mask16 m) { return m.m; }

// The tree of a lane sum.
CALSTACK_INLINE float tree_sum(F32x16 a) {
  const __m256 y = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
CALSTACK_INLINE float max_lane(F32x16 a) { return _mm512_reduce_max_ps(a.v); }

CALSTACK_INLINE I32x16 operator+(I32x16 a, I32x16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
CALSTACK_INLINE I32x16 operator-(I32x16 a, I32x16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
CALSTACK_INLINE I32x16 operator&(I32x16 a, I32x16 b) { return {_mm512_and_si512(a.v, b.v)}; }
template <int n> CALSTACK_INLINE I32x16 shift_left(I32x16 a) { return {_mm512_slli_epi32(a.v, n)}; }
template <int n> CALSTACK_INLINE I32x16 shift_right(I32x16 a) { return {_mm512_srli_epi32(a.v, n)}; }  // logical
CALSTACK_INLINE int32_t sum_lanes(I32x16 a) { return _mm512_reduce_add_epi32(a.v); }

// Lane i = the lanes of v[i], put together by op: a transposition that halves at each step.
template <class Op> CALSTACK_INLINE __m512 fold_each(const __m512 (&v)[16], Op op) {
  __m512 a[8], b[4];
  for (int i = 0; i < 8; ++i) a[i] = op(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
  for (int i = 0; i < 4; ++i) {
    const __m512d p = _mm512_castps_pd(a[2 * i]), q = _mm512_castps_pd(a[2 * i + 1]);
    b[i] = op(_mm512_castpd_ps(_mm512_unpacklo_pd(p, q)), _mm512_castpd_ps(_mm512_unpackhi_pd(p, q)));
  }
  const __m512 c = op(_mm512_shuffle_f32x4(b[0], b[1], 0x88), _mm512_shuffle_f32x4(b[0], b[1], 0xdd));
  const __m512 d = op(_mm512_shuffle_f32x4(b[2], b[3], 0x88), _mm512_shuffle_f32x4(b[2], b[3], 0xdd));
  return op(_mm512_shuffle_f32x4(c, d, 0x88), _mm512_shuffle_f32x4(c, d, 0xdd));
}
// Lane i = the largest lane of v[i].
CALSTACK_INLINE F32x16 max_of_each(const F32x16 (&v)[16]) {
  __m512 raw[16];
  for (int i = 0; i < 16; ++i) raw[i] = v[i].v;
  return {fold_each(raw, [](__m512 a, __m512 b) { return _mm512_max_ps(a, b); })};
}
// Lane i = the sum of the lanes of v[i].
CALSTACK_INLINE I32x16 sum_of_each(const I32x16 (&v)[16]) {
  __m512 raw[16];
  for (int i = 0; i < 16; ++i) raw[i] = _mm512_castsi512_ps(v[i].v);
  const auto add = [](__m512 a, __m512 b) {
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
  };
  return {_mm512_castps_si512(fold_each(raw, add))};
}

CALSTACK_INLINE F32x16 to_f32(I32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
CALSTACK_INLINE I32x16 to_i32(F32x16 a) { return {_mm512_cvtps_epi32(a.v)}; }
CALSTACK_INLINE I32x16 as_i32(F32x16 a) { return {_mm512_castps_si512(a.v)}; }
CALSTACK_INLINE F32x16 as_f32(I32x16 a) { return {_mm512_castsi512_ps(a.v)}; }
// The low byte of each lane.
CALSTACK_INLINE void store_i8(I32x16 a, int8_t* p) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a.v)); }

// Lanes 2 i and 2 i + 1 change places.
CALSTACK_INLINE F32x16 swap_neighbours(F32x16 a) { return {_mm512_permute_ps(a.v, 0xb1)}; }
// The low (0) or high (1) signed byte of sixteen pairs, as f32.
template <int byte> CALSTACK_INLINE F32x16 code_of_pair(const void* p) {
  const __m256i pairs = _mm256_loadu_si256((const __m256i*)p);
  const __m512i wide = _mm512_cvtepi16_epi32(byte == 1 ? pairs : _mm256_slli_epi16(pairs, 8));
  return {_mm512_cvtepi32_ps(_mm512_srai_epi32(wide, 8))};
}

// Low and high nibbles of every byte.
CALSTACK_INLINE I32x16 low_nibbles(I32x16 a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
CALSTACK_INLINE I32x16 high_nibbles(I32x16 a) { return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))}; }

// acc + the dot product of four unsigned and four signed bytes per lane. `small`: every unsigned byte is below 16.
template <bool small> CALSTACK_INLINE I32x16 dot4(I32x16 acc, I32x16 u8, I32x16 s8) {
  return {_mm512_dpbusd_epi32(acc.v, u8.v, s8.v)};
}

CALSTACK_INLINE void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }

}  // namespace CALSTACK_ISA
}  // namespace calstack
