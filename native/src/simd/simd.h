// Sixteen lanes of f32 or i32, whatever the instruction set: one zmm, two ymm, or an array. The kernels are templates over nothing but
// this header: the set is chosen by the flags the file is compiled with, the namespace by CALSTACK_ISA.
//
// Both types are plain values. All functions are lane-wise unless named otherwise; fma is one rounding; to_i32 and rint round to
// nearest-even; max(a, b) is a > b ? a : b in each lane. "first n" forms touch only the first n elements of memory (n in 0..16).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#ifndef CALSTACK_ISA
#error "compile with CALSTACK_ISA=portable|avx2|avx2_vnni|avx512"
#endif

#if defined(CALSTACK_SANITIZE)
#define CALSTACK_INLINE inline  // checks in every lane of forced inlining take minutes to compile
#else
#define CALSTACK_INLINE inline __attribute__((always_inline))
#endif

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#include "simd/avx512.h"
#elif defined(__AVX2__) && defined(__FMA__)
#include "simd/avx2.h"
#else
#include "simd/portable.h"
#endif

namespace calstack {
namespace CALSTACK_ISA {

// Four activation codes in every lane.
CALSTACK_INLINE I32x16 broadcast4(const int8_t* p) {
  int32_t v;
  std::memcpy(&v, p, 4);
  return I32x16::broadcast(v);
}

}  // namespace CALSTACK_ISA
}  // namespace calstack
