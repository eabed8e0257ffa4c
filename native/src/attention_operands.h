// The two sides of attention's products. The left side is a row of a few query vectors (q, or p), the right one the cache: rows over head
// dimensions for scores, over keys for values. Both are walked in pairs of rows. A pair holds, per lane,
//
//   Floats      two f32 rows, one behind the other; the first is multiplied first
//   Bf16Pairs   32 bits: an even row's value low, an odd row's high; the odd one is multiplied first
//   Int8Pairs   16 bits of codes, in the same order
//
// With instructions for products of bf16 pairs a step takes a whole pair, and the left side is bf16 too; without, a step takes one row in
// f32, and the left side lies in the order of the steps.
#pragma once
#include "attention_scratch.h"
#include "calstack/kernels.h"
#include "simd/math.h"
#include "simd/simd.h"

namespace calstack {
namespace CALSTACK_ISA {
namespace {

// Rounded to nearest-even bf16, still as f32; what is too small for exact products of pairs becomes +0. No value is beyond the largest bf16.
CALSTACK_INLINE F32x16 round_bf16(F32x16 x) {
  const I32x16 raw = as_i32(x), odd = shift_right<16>(raw) & I32x16::broadcast(1);
  const F32x16 near = as_f32((raw + (odd + I32x16::broadcast(0x7fff))) & I32x16::broadcast(static_cast<int32_t>(0xffff0000)));
  return select(less(abs(x), F32x16::broadcast(kLeastBf16)), F32x16::zero(), near);
}

// f32 rows, and wide copies of pairs where a step takes one row.
struct Floats {
  static constexpr int kSteps = 2;
  static constexpr size_t kLaneBytes = 8, kLeftBytes = 8;
  static constexpr bool kRowsApart = true;
  // Lanes 16 n to 16 n + 15 of a step of a pair.
  template <int step>
  static CALSTACK_INLINE F32x16 right(const uint8_t* pair, size_t lanes, int n) {
    return F32x16::load(reinterpret_cast<const float*>(pair) + static_cast<size_t>(step) * lanes + static_cast<size_t>(n) * 16);
  }
  template <int step>
  static CALSTACK_INLINE F32x16 left(const uint8_t* pair) {
    return F32x16::broadcast(reinterpret_cast<const float*>(pair)[step]);
  }
  static CALSTACK_INLINE F32x16 add(F32x16 acc, F32x16 left, F32x16 right) { return fma(left, right, acc); }
};

#if defined(__AVX512BF16__)

CALSTACK_INLINE void store_rounded(F32x16 x, uint16_t* to) {
  const __mmask16 large = _mm512_cmp_ps_mask(abs(x).v, _mm512_set1_ps(kLeastBf16), _CMP_NLT_UQ);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), reinterpret_cast<__m256i>(_mm512_maskz_cvtneps_pbh(large, x.v)));
}

struct Bf16Pairs {
  static constexpr int kSteps = 1;
  static constexpr size_t kLaneBytes = 4, kLeftBytes = 4;
  static constexpr bool kRowsApart = false;
  template <int step>
  static CALSTACK_INLINE I32x16 right(const uint8_t* pair, size_t, int n) {
    return I32x16::load(pair + static_cast<size_t>(n) * 64);
  }
  template <int step>
  static CALSTACK_INLINE I32x16 left(const uint8_t* pair) {
    int32_t both;
    std::memcpy(&both, pair, 4);
    return I32x16::broadcast(both);
  }
  // Two roundings, odd before even, as fma would; zero for denormals makes no difference, for there are none (docs/concepts/numerics.md).
  static CALSTACK_INLINE F32x16 add(F32x16 acc, I32x16 left, I32x16 right) {
    return {_mm512_dpbf16_ps(acc.v, reinterpret_cast<__m512bh>(left.v), reinterpret_cast<__m512bh>(right.v))};
  }
};

struct Int8Pairs : Bf16Pairs {
  static constexpr size_t kLaneBytes = 2;
  template <int step>
  static CALSTACK_INLINE I32x16 right(const uint8_t* pair, size_t, int n) {
    const __m512i both = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(pair + static_cast<size_t>(n) * 32)));
    const __m512 odd = _mm512_cvtepi32_ps(_mm512_srai_epi32(both, 16));
    const __m512 even = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(both, 16), 16));
    return {_mm512_or_si512(_mm512_castps_si512(odd), _mm512_srli_epi32(_mm512_castps_si512(even), 16))};
  }
};

#else

// Halves of 32 bits that hold two bf16: step 0 the odd row.
template <int step>
CALSTACK_INLINE F32x16 half_of(I32x16 pair) {
  return as_f32(step == 0 ? pair & I32x16::broadcast(static_cast<int32_t>(0xffff0000)) : shift_left<16>(pair));
}

struct Bf16Pairs {
  static constexpr int kSteps = 2;
  static constexpr size_t kLaneBytes = 4, kLeftBytes = 8;
  static constexpr bool kRowsApart = false;
  template <int step>
  static CALSTACK_INLINE F32x16 right(const uint8_t* pair, size_t, int n) {
    return half_of<step>(I32x16::load(pair + static_cast<size_t>(n) * 64));
  }
  template <int step>
  static CALSTACK_INLINE F32x16 left(const uint8_t* pair) {
    return Floats::left<step>(pair);
  }
  static CALSTACK_INLINE F32x16 add(F32x16 acc, F32x16 left, F32x16 right) { return fma(left, right, acc); }
};

struct Int8Pairs : Bf16Pairs {
  static constexpr size_t kLaneBytes = 2;
  template <int step>
  static CALSTACK_INLINE F32x16 right(const uint8_t* pair, size_t, int n) {
    return code_of_pair<1 - step>(pair + static_cast<size_t>(n) * 32);
  }
};

#endif

// What a cache holds, and how wide copies of it look.
struct StoredF32 {
  using Direct = Floats;
  using Wide = Floats;
};
struct StoredBf16 {
  using Direct = Bf16Pairs;
  using Wide = std::conditional_t<Bf16Pairs::kSteps == 1, Bf16Pairs, Floats>;
};
struct StoredInt8 {
  using Direct = Int8Pairs;
  using Wide = StoredBf16::Wide;
};

template <class KT, class VT>
struct Stored {
  using K = KT;
  using V = VT;
  static constexpr bool kBf16Left = !std::is_same_v<KT, StoredF32>;
  static constexpr bool kScaledK = std::is_same_v<KT, StoredInt8>, kScaledV = std::is_same_v<VT, StoredInt8>;
};

// Sixteen values of a left row, the first of them at `at`.
template <class S>
CALSTACK_INLINE void put_left(F32x16 x, float* row, size_t at) {
  if constexpr (!S::kBf16Left) {
    x.store(row + at);
  } else {
#if defined(__AVX512BF16__)
    store_rounded(x, reinterpret_cast<uint16_t*>(row) + at);
#else
    swap_neighbours(round_bf16(x)).store(row + at);
#endif
  }
}

}  // namespace
}  // namespace CALSTACK_ISA
}  // namespace calstack
