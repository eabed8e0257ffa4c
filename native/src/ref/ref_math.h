// Scalar arithmetic of docs/concepts/numerics.md, word for word and written for reading, not for speed.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>

#include "calstack/kernels.h"

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

[[maybe_unused]] inline float silu_f32(float x) { return x * sigmoid_f32(x); }

[[maybe_unused]] inline float gelu_tanh_f32(float x) {
  const float u = x * 0x1.988454p-1f * std::fma(x * x, 0x1.6e4e26p-5f, 1.0f);
  return x * sigmoid_f32(2.0f * u);
}

[[maybe_unused]] inline float gelu_f32(float x) {
  const float z = std::fabs(x) * 0x1.6a09e6p-1f;
  const float t = 1.0f / std::fma(z, 0x1.4f740ap-2f, 1.0f);
  float p = 0x1.0fb844p+0f;
  for (float c : {-0x1.7401c6p+0f, 0x1.6be1c6p+0f, -0x1.23531cp-2f, 0x1.04f20cp-2f}) p = std::fma(p, t, c);
  const float tail = p * t * exp_f32(-(z * z)) * 0.5f;
  return x < 0.0f ? x * tail : x * (1.0f - tail);
}

[[maybe_unused]] inline float activate(Act act, float x) {
  if (act == Act::silu) return silu_f32(x);
  if (act == Act::tanh) return tanh_f32(x);
  return act == Act::gelu_tanh ? gelu_tanh_f32(x) : gelu_f32(x);
}

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

// 1 / rms of a row.
[[maybe_unused]] inline float rms_factor(const float* x, int n, float eps) {
  return 1.0f / std::sqrt(lane_sum_of_squares(x, n) / static_cast<float>(n) + eps);
}

[[maybe_unused]] inline float bf16_to_float(uint16_t h) { return bits_to_float(static_cast<uint32_t>(h) << 16); }

[[maybe_unused]] inline uint16_t float_to_bf16(float f) {
  const uint32_t bits = float_to_bits(f);
  if (f != f) return static_cast<uint16_t>((bits >> 16) | 0x40);  // stays a NaN
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// As K, V and the factors beside them: too small for exact products of pairs is +0.
[[maybe_unused]] inline float round_bf16(float f) { return std::fabs(f) < 0x1p-50f ? 0.0f : bf16_to_float(float_to_bf16(f)); }

}  // namespace
}  // namespace calstack::reference
