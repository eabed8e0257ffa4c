// Linear layers and the embedding: the scalar reference. One output at a time, weights looked up one by one.
#include "half.h"
#include "kernel_parts.h"
#include "packed.h"
#include "ref/ref_math.h"

namespace calstack {
namespace reference {
namespace {

uint16_t u16_at(const uint8_t* p, size_t i) {
  uint16_t v;
  std::memcpy(&v, p + 2 * i, 2);
  return v;
}

// Reads single weights out of the packed layout.
struct WeightReader {
  const Weight& w;
  bool eight_bits = w.format == WFmt::w8a8;

  const uint8_t* group(int n, int g) const { return w.data + (size_t)(n / kLane) * block_bytes(w) + (size_t)g * group_bytes(w); }
  // The code as numerics.md counts it: q, or q - 8 where there is no minimum.
  int code(int n, int k) const {
    const uint8_t* p = group(n, k / w.group) + 4 * (n % kLane);
    const int i = k % w.group;
    if (eight_bits) return (int)p[64 * (i / 4) + i % 4] - 128;
    const uint8_t byte = p[64 * (i / 8) + i % 4];
    const int q = i % 8 < 4 ? byte & 15 : byte >> 4;
    return w.minimum ? q : q - 8;
  }
  float scale(int n, int g) const { return f16_to_f32(u16_at(group(n, g) + code_bytes(w), n % kLane)); }
  float minimum(int n, int g) const { return f16_to_f32(u16_at(group(n, g) + code_bytes(w) + 32, n % kLane)); }
  float plain(int n, int k) const {
    const uint8_t* p = w.data + (size_t)(n / kLane) * block_bytes(w);
    const size_t i = (size_t)k * kLane + n % kLane;
    if (w.format == WFmt::bf16) return bf16_to_f32(u16_at(p, i));
    if (w.format == WFmt::f16) return f16_to_f32(u16_at(p, i));
    float f;
    std::memcpy(&f, p + 4 * i, 4);
    return f;
  }
  // The weight as one f32.
  float value(int n, int k) const {
    if (!is_grouped(w.format)) return plain(n, k);
    const float d = scale(n, k / w.group), q = (float)code(n, k);
    return w.minimum ? std::fma(d, q, minimum(n, k / w.group)) : d * q;
  }
};

float dot_quantised(const WeightReader& w, int n, const QuantRows& a, int row) {
  float acc = 0.0f;
  for (int g = 0; g < w.w.k / w.w.group; ++g) {
    int32_t i = 0;
    for (int k = g * w.w.group; k < (g + 1) * w.w.group; ++k) i += w.code(n, k) * a.codes[(size_t)row * a.k + k];
    const size_t at = (size_t)row * (a.k / a.group) + g;
    acc = std::fma((float)i * a.scale[at], w.scale(n, g), acc);
    if (w.w.minimum) acc = std::fma(w.minimum(n, g), a.asum[at], acc);
  }
  return acc;
}

float dot_f32(const WeightReader& w, int n, const float* x) {
  float acc = 0.0f;
  for (int k = 0; k < w.w.k; ++k) acc = std::fma(w.value(n, k), x[k], acc);
  return acc;
}

// out[row][column] from y(n), the sum of packed output n, over blocks [nb0, nb1).
template <class Sum>
void finish_row(const Weight& w, const float* bias, Epilogue ep, Act act, float* out, int nb0, int nb1, Sum sum) {
  const auto y = [&](int n) { return bias ? sum(n) + bias[n] : sum(n); };
  for (int nb = nb0; nb < nb1; nb += ep == Epilogue::gated ? 2 : 1) {
    const BlockOut to = block_out(w, ep, nb);
    for (int i = 0; i < to.lanes; ++i) {
      float& o = out[to.column + i];
      const int n = nb * kLane + i;
      if (ep == Epilogue::gated) o = activate(act, y(n)) * y(n + kLane);
      else if (ep == Epilogue::activated) o = activate(act, y(n));
      else o = ep == Epilogue::residual ? o + y(n) : y(n);
    }
  }
}

void linear_q(const Weight& w, const QuantRows& a, int rows, const float* bias, Epilogue ep, Act act, float* out, size_t os, int nb0,
              int nb1) {
  const WeightReader reader{w};
  for (int r = 0; r < rows; ++r)
    finish_row(w, bias, ep, act, out + (size_t)r * os, nb0, nb1, [&](int n) { return dot_quantised(reader, n, a, r); });
}

void linear_f(const Weight& w, const float* x, size_t xs, int rows, const float* bias, Epilogue ep, Act act, float* out, size_t os, int nb0,
              int nb1) {
  const WeightReader reader{w};
  for (int r = 0; r < rows; ++r)
    finish_row(w, bias, ep, act, out + (size_t)r * os, nb0, nb1, [&](int n) { return dot_f32(reader, n, x + (size_t)r * xs); });
}

void embed_rows(const Weight& w, const int32_t* ids, float scale, float* out, size_t os, int r0, int r1) {
  const WeightReader reader{w};
  for (int r = r0; r < r1; ++r)
    for (int k = 0; k < w.k; ++k) {
      const float v = reader.value(ids[r], k);
      out[(size_t)r * os + k] = scale == 1.0f ? v : v * scale;
    }
}

}  // namespace

void fill_linear_q(KernelTable& t) { t.linear_q = linear_q; }
void fill_linear_f(KernelTable& t) { t.linear_f = linear_f; }
void fill_embed(KernelTable& t) { t.embed_rows = embed_rows; }

}  // namespace reference
}  // namespace calstack
