// Scalar conversions of 16-bit floats, exact or rounded to nearest-even. Internal linkage: see kernel_parts.h.
#pragma once
#include <cstdint>
#include <cstring>

namespace calstack {

static inline float bits_to_f32(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

static inline uint32_t f32_to_bits(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}

[[maybe_unused]] static inline float bf16_to_f32(uint16_t h) { return bits_to_f32((uint32_t)h << 16); }

[[maybe_unused]] static inline uint16_t f32_to_bf16(float f) {
  const uint32_t u = f32_to_bits(f);
  return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

[[maybe_unused]] static inline float f16_to_f32(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000) << 16;
  const uint32_t exponent = h >> 10 & 31, fraction = h & 1023;
  if (exponent == 31) return bits_to_f32(sign | 0x7f800000 | fraction << 13);
  if (exponent != 0) return bits_to_f32(sign | (exponent + 112) << 23 | fraction << 13);
  const float magnitude = (float)fraction * 0x1p-24f;  // a denormal half is a normal float
  return bits_to_f32(sign | f32_to_bits(magnitude));
}

}  // namespace calstack
