// Scalar reference of rope_table and qk_norm_rope_kv.
#include <vector>

#include "../kernel_parts.h"
#include "../kv_layout.h"
#include "ref_math.h"

namespace calstack::reference {
namespace {

struct CosSin {
  double cos, sin;
};

CosSin cos_sin(float angle) {
  static constexpr double S[] = {1.0 / 6227020800.0, -1.0 / 39916800.0, 1.0 / 362880.0, -1.0 / 5040.0, 1.0 / 120.0, -1.0 / 6.0};
  static constexpr double C[] = {-1.0 / 87178291200.0, 1.0 / 479001600.0, -1.0 / 3628800.0, 1.0 / 40320.0, -1.0 / 720.0, 1.0 / 24.0};
  const double a = angle;
  const double n = std::rint(a * 0x1.45f306dc9c883p-1);
  double r = std::fma(n, -0x1.921fb54442d18p+0, a);
  r = std::fma(n, -0x1.1a62633145c07p-54, r);
  const double z = r * r;
  double sp = S[0], cp = C[0];
  for (int i = 1; i < 6; ++i) sp = std::fma(sp, z, S[i]), cp = std::fma(cp, z, C[i]);
  const double s = std::fma(r * z, sp, r);
  const double c = std::fma(z * z, cp, std::fma(z, -0.5, 1.0));
  switch (static_cast<int64_t>(n) & 3) {
    case 0: return {c, s};
    case 1: return {-s, c};
    case 2: return {-c, -s};
    default: return {s, -c};
  }
}

void rope_table(const float* inv_freq, int half, double factor, const int32_t* positions, float* out, size_t os, int r0, int r1) {
  for (int r = r0; r < r1; ++r) {
    float* row = out + static_cast<size_t>(r) * os;
    for (int i = 0; i < half; ++i) {
      const CosSin v = cos_sin(static_cast<float>(positions[r]) * inv_freq[i]);
      row[i] = static_cast<float>(v.cos * factor);
      row[half + i] = static_cast<float>(v.sin * factor);
    }
  }
}

void norm_head(float* x, int n, const float* weight, float eps) {
  if (!weight) return;
  const float r = 1.0f / std::sqrt(lane_sum_of_squares(x, n) / static_cast<float>(n) + eps);
  for (int i = 0; i < n; ++i) x[i] = (x[i] * r) * weight[i];
}

void rotate(float* x, const float* table, int rope_dim) {
  const int half = rope_dim / 2;
  for (int i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half], c = table[i], s = table[half + i];
    x[i] = std::fma(-b, s, a * c);
    x[i + half] = std::fma(a, s, b * c);
  }
}

struct Scale {
  float inv = 1.0f, value = 0.0f;
};

Scale scale_of(const float* x, size_t n) {
  float amax = 0.0f;
  for (size_t i = 0; i < n; ++i) amax = std::fmax(amax, std::fabs(x[i]));
  if (amax < 0x1p-100f) return {0.0f, 0.0f};
  return {127.0f / amax, amax / 127.0f};
}

float clamped(float x) {
  const float most = 0x1.fep+127f, up = x > -most ? x : -most;
  return up < most ? up : most;
}

void store(uint8_t* plane, size_t element, float value, size_t bytes, float inv) {
  if (bytes == 4) {
    std::memcpy(plane + element * 4, &value, 4);
  } else if (bytes == 2) {
    const uint16_t h = float_to_bf16(round_bf16(value));
    std::memcpy(plane + element * 2, &h, 2);
  } else {
    reinterpret_cast<int8_t*>(plane)[element] = static_cast<int8_t>(std::rint(value * inv));
  }
}

void write_kv(const KVView& kv, int lane, int position, int head, const float* k, const float* v) {
  uint8_t* layer = kv.base + static_cast<size_t>(kv.tables[lane][position / kBlockPositions]) * kv.block_bytes + kv.layer_offset;
  const size_t dim = static_cast<size_t>(kv.head_dim), h = static_cast<size_t>(head), j = static_cast<size_t>(position % kBlockPositions);
  const KVPlaces at(kv.type, kv.kv_heads, kv.head_dim);
  const bool pairs = kv.type != KVType::f32;
  std::vector<float> kc(k, k + dim), vc(v, v + dim);
  for (float& x : kc) x = clamped(x);
  for (float& x : vc) x = clamped(x);
  const Scale ks = scale_of(kc.data(), dim), vs = scale_of(vc.data(), dim);
  for (size_t d = 0; d < dim; ++d) {
    store(layer + at.k(h), pairs ? (d / 2 * kBlockPositions + j) * 2 + d % 2 : d * kBlockPositions + j, kc[d], k_bytes(kv.type), ks.inv);
    store(layer + at.v(h), pairs ? (j / 2 * dim + d) * 2 + j % 2 : j * dim + d, vc[d], v_bytes(kv.type), vs.inv);
  }
  if (k_scaled(kv.type)) store(layer + at.k_scale(h), j, ks.value, 4, 0.0f);
  if (v_scaled(kv.type)) store(layer + at.v_scale(h), j, vs.value, 4, 0.0f);
}

void qk_norm_rope_kv(float* qkv, size_t xs, const float* table, size_t ts, int rope_dim, const float* q_norm, const float* k_norm, float eps,
                     const AttnShape& s, const KVView& kv, const int32_t* lanes, const int32_t* positions, int r0, int r1, int h0, int h1) {
  const int group = s.heads / s.kv_heads;
  for (int r = r0; r < r1; ++r) {
    float* q = qkv + static_cast<size_t>(r) * xs;
    float* k = q + static_cast<size_t>(s.heads) * s.head_dim;
    const float* v = k + static_cast<size_t>(s.kv_heads) * s.head_dim;
    const float* t = table ? table + static_cast<size_t>(r) * ts : nullptr;
    for (int h = 0; h < s.heads + s.kv_heads; ++h) {  // k heads follow the q heads
      const int kv_head = h < s.heads ? h / group : h - s.heads;
      if (kv_head < h0 || kv_head >= h1) continue;
      norm_head(q + static_cast<size_t>(h) * s.head_dim, s.head_dim, h < s.heads ? q_norm : k_norm, eps);
      if (t) rotate(q + static_cast<size_t>(h) * s.head_dim, t, rope_dim);
    }
    for (int h = h0; h < h1; ++h) {
      const size_t at = static_cast<size_t>(h) * s.head_dim;
      write_kv(kv, lanes[r], positions[r], h, k + at, v + at);
    }
  }
}

}  // namespace

void fill_rope_kv(KernelTable& t) {
  t.rope_table = rope_table;
  t.qk_norm_rope_kv = qk_norm_rope_kv;
}

}  // namespace calstack::reference
