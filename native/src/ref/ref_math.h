// Scalar arithmetic of docs/concepts/numerics.md, word for word and written for reading, not for speed.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace calstack::reference {
namespace {

constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

[[maybe_unused]] inline float bits_to_float(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

[[maybe_unused]] inline uint32_t float_to_bits(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  return bits;
}

[[maybe_unused]] inline float exp_f32(float x) {
  if (x != x) return x;
  if (x < -87.0f) return 0.0f;
  if (x > 88.0f) x = 88.0f;
  const float n = std::rint(x * 0x1.715476p+0f);
  float r = std::fma(n, -0x1.62e4p-1f, x);
  r = std::fma(n, -0x1.7f7d1cp-20f, r);
  float p = 0x1.6850e4p-10f;
  for (float c : {0x1.123bccp-7f, 0x1.555b98p-5f, 0x1.55548ep-3f, 0x1.fffff8p-2f, 0x1p+0f, 0x1p+0f}) p = std::fma(p, r, c);
  return std::ldexp(p, static_cast<int>(n));
}

[[maybe_unused]] inline float sigmoid_f32(float x) { return 1.0f / (1.0f + exp_f32(-x)); }
[[maybe_unused]] inline float tanh_f32(float x) { return std::fma(2.0f, sigmoid_f32(2.0f * x), -1.0f); }
[[maybe_unused]] inline float soft_cap(float x, float cap) { return cap * tanh_f32(x / cap); }

// The tree that ends a lane sum.
template <class T>
inline T lane_tree(T (&a)[16]) {
  for (int width = 8; width > 0; width /= 2)
    for (int j = 0; j < width; ++j) a[j] += a[j + width];
  return a[0];
}

[[maybe_unused]] inline float lane_sum_of_squares(const float* x, int n) {
  float acc[16] = {};
  for (int i = 0; i < n; ++i) acc[i % 16] = std::fma(x[i], x[i], acc[i % 16]);
  return lane_tree(acc);
}

[[maybe_unused]] inline float bf16_to_float(uint16_t h) { return bits_to_float(static_cast<uint32_t>(h) << 16); }

[[maybe_unused]] inline uint16_t float_to_bf16(float f) {
  const uint32_t bits = float_to_bits(f);
  if (f != f) return static_cast<uint16_t>((bits >> 16) | 0x40);  // stays a NaN
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

}  // namespace
}  // namespace calstack::reference
