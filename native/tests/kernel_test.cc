// Every kernel of the linear family on every instruction set of this machine against the scalar reference, bit for bit, on buffers of
// exactly the size that the contract names: made to be run under address and undefined-behaviour sanitizers (CALSTACK_SANITIZE).
// The Python tests cover more shapes; this one sees a read or write past an end.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "calstack/kernels.h"
#include "packed.h"

namespace {

using namespace calstack;

int failures = 0;

void check_same(const void* a, const void* b, size_t bytes, const std::string& what) {
  if (std::memcmp(a, b, bytes) == 0) return;
  std::fprintf(stderr, "differs from the reference: %s\n", what.c_str());
  ++failures;
}

std::vector<float> random_floats(std::mt19937& rng, size_t n, float scale = 1.0f) {
  std::normal_distribution<float> normal;
  std::vector<float> v(n);
  for (auto& x : v) x = normal(rng) * scale;
  return v;
}

struct PackedWeight {
  std::vector<uint8_t> data;
  Weight w;
};

// Random codes; scales and minima are random halves between 2^-9 and 2^-6 with a sign.
PackedWeight random_weight(std::mt19937& rng, WFmt format, int n, int k, int group, bool minimum, int blocks) {
  PackedWeight p{{}, {nullptr, format, n, k, is_grouped(format) ? group : 0, minimum}};
  p.data.resize(block_bytes(p.w) * (size_t)blocks);
  const auto half = [&] { return (uint16_t)((rng() & 0x8000) | (0x1800 + rng() % 0x0c00)); };
  for (auto& b : p.data) b = (uint8_t)rng();
  const size_t step = is_grouped(format) ? group_bytes(p.w) : 64, codes = is_grouped(format) ? code_bytes(p.w) : 0;
  for (size_t g = 0; g < p.data.size(); g += step)
    for (size_t i = codes; i < step; i += 2) {
      const uint16_t h = half();
      const float f = std::ldexp((float)(int16_t)h, -20);
      if (format == WFmt::f32 && i % 4 == 0) std::memcpy(&p.data[g + i], &f, 4);
      if (format != WFmt::f32) std::memcpy(&p.data[g + i], &h, 2);
    }
  p.w.data = p.data.data();
  return p;
}

struct Quantised {
  std::vector<int8_t> codes;
  std::vector<float> scale, asum;
  std::vector<int32_t> isum;
  QuantRows rows;
  Quantised(const KernelTable& t, const std::vector<float>& x, const float* norm, int count, int k, int group)
      : codes(x.size()), scale(x.size() / (size_t)group), asum(scale.size()), isum(scale.size()) {
    rows = {codes.data(), scale.data(), asum.data(), isum.data(), k, group};
    t.quant_rows(x.data(), (size_t)k, NormSpec{norm, 1e-5f}, rows, 0, count);
  }
};

void test_quant(const KernelTable& t, const KernelTable& ref, std::mt19937& rng) {
  for (int group : {32, 64, 128})
    for (bool normed : {false, true}) {
      const int k = 3 * group, rows = 5;
      const auto x = random_floats(rng, (size_t)rows * (size_t)k), w = random_floats(rng, (size_t)k);
      const Quantised a(t, x, normed ? w.data() : nullptr, rows, k, group), b(ref, x, normed ? w.data() : nullptr, rows, k, group);
      const std::string what = std::string(t.name) + " quant_rows group " + std::to_string(group);
      check_same(a.codes.data(), b.codes.data(), a.codes.size(), what + " codes");
      check_same(a.scale.data(), b.scale.data(), 4 * a.scale.size(), what + " scale");
      check_same(a.asum.data(), b.asum.data(), 4 * a.asum.size(), what + " asum");
      check_same(a.isum.data(), b.isum.data(), 4 * a.isum.size(), what + " isum");
    }
}

void test_norm(const KernelTable& t, const KernelTable& ref, std::mt19937& rng) {
  for (int n : {1, 15, 16, 17, 47, 576}) {
    const auto x = random_floats(rng, 3 * (size_t)n), w = random_floats(rng, (size_t)n);
    std::vector<float> a(x.size()), b(x.size());
    t.norm_rows(x.data(), (size_t)n, NormSpec{w.data(), 1e-5f}, a.data(), (size_t)n, n, 0, 3);
    ref.norm_rows(x.data(), (size_t)n, NormSpec{w.data(), 1e-5f}, b.data(), (size_t)n, n, 0, 3);
    check_same(a.data(), b.data(), 4 * a.size(), std::string(t.name) + " norm_rows n " + std::to_string(n));
  }
}

struct Case {
  WFmt format;
  bool minimum;
};

constexpr Case kCases[] = {{WFmt::w4a8, true}, {WFmt::w4a8, false}, {WFmt::w8a8, false}, {WFmt::w4a16, true},
                           {WFmt::w4a16, false}, {WFmt::bf16, false}, {WFmt::f16, false}, {WFmt::f32, false}};

void run_linear(const KernelTable& t, const Weight& w, const Quantised& q, const std::vector<float>& x, int rows, const float* bias,
                Epilogue ep, float* out, size_t os, int blocks) {
  if (w.format == WFmt::w4a8 || w.format == WFmt::w8a8) t.linear_q(w, q.rows, rows, bias, ep, Act::silu, out, os, 0, blocks);
  else t.linear_f(w, x.data(), (size_t)w.k, rows, bias, ep, Act::silu, out, os, 0, blocks);
}

void test_linear(const KernelTable& t, const KernelTable& ref, const Case& c, int n, int group, Epilogue ep, std::mt19937& rng) {
  const int k = 2 * group, columns = ep == Epilogue::gated ? n / 2 : n;
  const int blocks = (ep == Epilogue::gated ? 2 : 1) * ((columns + 15) / 16);
  const PackedWeight p = random_weight(rng, c.format, n, k, group, c.minimum, blocks);
  const auto bias = random_floats(rng, (size_t)(ep == Epilogue::gated ? blocks * 16 - (16 - columns % 16) % 16 : n));
  for (int rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 19}) {
    const auto x = random_floats(rng, (size_t)rows * (size_t)k);
    const Quantised q(ref, x, nullptr, rows, k, group);
    std::vector<float> a = random_floats(rng, (size_t)rows * (size_t)columns), b = a;
    run_linear(t, p.w, q, x, rows, bias.data(), ep, a.data(), (size_t)columns, blocks);
    run_linear(ref, p.w, q, x, rows, bias.data(), ep, b.data(), (size_t)columns, blocks);
    check_same(a.data(), b.data(), 4 * a.size(),
               std::string(t.name) + " linear format " + std::to_string((int)c.format) + " n " + std::to_string(n) + " rows " +
                   std::to_string(rows) + " epilogue " + std::to_string((int)ep));
  }
}

void test_embed(const KernelTable& t, const KernelTable& ref, const Case& c, std::mt19937& rng) {
  const int n = 20, k = 128;
  const PackedWeight p = random_weight(rng, c.format, n, k, 64, c.minimum, 2);
  const int32_t ids[] = {19, 0, 16, 15};
  std::vector<float> a(4 * (size_t)k), b(a.size());
  t.embed_rows(p.w, ids, 2.5f, a.data(), (size_t)k, 0, 4);
  ref.embed_rows(p.w, ids, 2.5f, b.data(), (size_t)k, 0, 4);
  check_same(a.data(), b.data(), 4 * a.size(), std::string(t.name) + " embed format " + std::to_string((int)c.format));
}

void test_table(const KernelTable& t, const KernelTable& ref) {
  std::mt19937 rng(1);
  test_quant(t, ref, rng);
  test_norm(t, ref, rng);
  for (const Case& c : kCases) {
    for (int group : {32, 64, 128})
      for (Epilogue ep : {Epilogue::store, Epilogue::residual, Epilogue::gated})
        for (int n : {2, 34, 64}) test_linear(t, ref, c, n, group, ep, rng);
    test_embed(t, ref, c, rng);
  }
  std::printf("%s: linear, norm, quant and embed kernels done\n", t.name);
}

}  // namespace

int main() {
  const KernelTable& ref = *kernels_reference();
  for (const char* name : {"reference", "portable", "avx2", "avx2_vnni", "avx512_vnni", "avx512_bf16"})
    if (const KernelTable* t = kernels_by_name(name)) test_table(*t, ref);
  if (failures) std::fprintf(stderr, "%d checks failed\n", failures);
  return failures ? 1 : 0;
}
