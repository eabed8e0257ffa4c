// Rope, KV write, attention and the sampler on every instruction set of this machine against the scalar reference, bit for bit, on buffers
// of exactly the size that the contract names: made to be run under sanitizers, as kernel_test.cc is.
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "calstack/kernels.h"
#include "kv_layout.h"

namespace {

using namespace calstack;

int failures = 0;

void check_same(const void* a, const void* b, size_t bytes, const std::string& what) {
  if (std::memcmp(a, b, bytes) == 0) return;
  std::fprintf(stderr, "differs from the reference: %s\n", what.c_str());
  ++failures;
}

template <class T> void check_same(const std::vector<T>& a, const std::vector<T>& b, const std::string& what) {
  check_same(a.data(), b.data(), a.size() * sizeof(T), what);
}

std::vector<float> random_floats(std::mt19937& rng, size_t n, float scale = 1.0f) {
  std::normal_distribution<float> normal;
  std::vector<float> v(n);
  for (auto& x : v) x = normal(rng) * scale;
  return v;
}

// One lane's cache, poisoned with NaN, its blocks in reverse order.
struct Cache {
  std::vector<uint8_t> bytes;
  std::vector<int32_t> table;
  const int32_t* lane;
  KVView view;

  Cache(KVType type, const AttnShape& s, int positions) {
    const size_t block = KVPlaces(type, s.kv_heads, s.head_dim).bytes();
    const int blocks = (positions + kBlockPositions - 1) / kBlockPositions;
    bytes.assign(block * static_cast<size_t>(blocks), 0xff);
    for (int i = blocks; i > 0; --i) table.push_back(i - 1);
    lane = table.data();
    view = {type, bytes.data(), block, 0, s.kv_heads, s.head_dim, &lane};
  }
};

// Everything a prompt goes through, at exact sizes: rows, cache and outputs.
struct Run {
  std::vector<float> qkv, out, ml, o, merged;
  Cache cache;
};

Run run(const KernelTable& t, const AttnShape& s, KVType type, int rows, const std::vector<float>& x, const std::vector<float>& norm) {
  const size_t dim = static_cast<size_t>(s.head_dim), xs = static_cast<size_t>(s.heads + 2 * s.kv_heads) * dim, os = static_cast<size_t>(s.heads) * dim;
  const int half = s.head_dim / 2, last = rows - 1, splits = last / kSplitKeys + 1;
  std::vector<int32_t> lanes(static_cast<size_t>(rows), 0), positions;
  for (int i = 0; i < rows; ++i) positions.push_back(i);
  std::vector<float> inv_freq, table(static_cast<size_t>(rows) * dim);
  for (int i = 0; i < half; ++i) inv_freq.push_back(1.0f / static_cast<float>(1 + i));
  t.rope_table(inv_freq.data(), half, 1.0, positions.data(), table.data(), dim, 0, rows);
  Run r{x, std::vector<float>(os * static_cast<size_t>(rows)), {}, {}, std::vector<float>(os), Cache(type, s, rows)};
  t.qk_norm_rope_kv(r.qkv.data(), xs, table.data(), dim, half * 2, norm.data(), norm.data(), 1e-5f, s, r.cache.view, lanes.data(), positions.data(), 0, rows, 0, s.kv_heads);
  std::vector<uint8_t> scratch(attention_scratch_bytes(s));
  for (int h = 0; h < s.kv_heads; ++h) {
    t.attention(r.qkv.data(), xs, s, r.cache.view, 0, positions.data(), h, 0, rows, r.out.data(), os, scratch.data());
  }
  const size_t heads = static_cast<size_t>(s.heads);
  r.ml.assign(static_cast<size_t>(splits) * 2 * heads, 0.0f);
  r.o.assign(static_cast<size_t>(splits) * heads * dim, 0.0f);
  for (size_t i = 0; i < static_cast<size_t>(splits); ++i)
    for (int h = 0; h < s.kv_heads; h += 2)
      t.attention_split(r.qkv.data(), xs, s, r.cache.view, 0, last, h, h + 2 < s.kv_heads ? h + 2 : s.kv_heads, last, static_cast<int>(i),
                        r.ml.data() + i * 2 * heads, r.o.data() + i * heads * dim, scratch.data());
  t.attention_merge(s, r.ml.data(), r.o.data(), splits, 0, s.heads, r.merged.data());
  return r;
}

void test_attention(const KernelTable& t, const KernelTable& ref, const AttnShape& s, KVType type, int rows) {
  std::mt19937 rng(static_cast<uint32_t>(s.head_dim * 1000 + rows));
  const std::vector<float> norm = random_floats(rng, static_cast<size_t>(s.head_dim));
  const std::vector<float> x = random_floats(rng, static_cast<size_t>((s.heads + 2 * s.kv_heads) * s.head_dim * rows));
  const Run a = run(t, s, type, rows, x, norm), b = run(ref, s, type, rows, x, norm);
  const std::string what = std::string(t.name) + ", head_dim " + std::to_string(s.head_dim) + ", rows " + std::to_string(rows);
  check_same(a.qkv, b.qkv, "rope, " + what);
  check_same(a.cache.bytes, b.cache.bytes, "cache, " + what);
  check_same(a.out, b.out, "attention, " + what);
  check_same(a.ml, b.ml, "partial, " + what);
  check_same(a.o, b.o, "partial o, " + what);
  check_same(a.merged, b.merged, "merge, " + what);
  check_same(a.merged.data(), a.out.data() + static_cast<size_t>(rows - 1) * a.merged.size(), 4 * a.merged.size(), "row alone, " + what);
}

SampleArgs arguments(int kind, const std::vector<int32_t>& history, const std::vector<uint32_t>& mask) {
  SampleArgs a{};
  a.temperature = kind == 0 ? 0.0f : 0.9f, a.top_p = kind & 1 ? 0.9f : 1.0f, a.min_p = kind & 2 ? 0.01f : 0.0f, a.top_k = kind & 4 ? 20 : 0;
  a.repetition = 1.2f, a.frequency = 0.1f, a.presence = 0.2f, a.seed = 3, a.index = static_cast<uint64_t>(kind), a.top_logprobs = 5;
  a.prompt = a.output = history.data(), a.n_prompt = a.n_output = static_cast<int>(history.size());
  a.mask = kind & 8 ? mask.data() : nullptr;
  return a;
}

struct Sampled {
  std::vector<float> z, logprobs = std::vector<float>(5);
  std::vector<int32_t> ids = std::vector<int32_t>(5);
  int32_t token;
};

Sampled sample(const KernelTable& t, const std::vector<float>& logits, const SampleArgs& a) {
  Sampled s{logits, std::vector<float>(5), std::vector<int32_t>(5), 0};
  std::vector<double> scratch(2 * logits.size());
  SampleOut out{0, 0.0f, s.ids.data(), s.logprobs.data()};
  t.sample(s.z.data(), static_cast<int>(s.z.size()), 0.0f, a, out, scratch.data());
  s.token = out.token;
  return s;
}

void test_sampler(const KernelTable& t, const KernelTable& ref, size_t vocab, bool nan) {
  std::mt19937 rng(static_cast<uint32_t>(vocab));
  std::vector<float> logits = random_floats(rng, vocab, 3.0f);
  if (nan) logits[vocab / 2] = std::numeric_limits<float>::quiet_NaN();
  std::vector<int32_t> history = {-1, 0, 0, static_cast<int32_t>(vocab), std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min()};
  std::vector<uint32_t> mask((vocab + 31) / 32);
  for (auto& word : mask) word = static_cast<uint32_t>(rng());
  for (int kind = 0; kind < 16; ++kind) {
    const SampleArgs args = arguments(kind, history, mask);
    const Sampled a = sample(t, logits, args), b = sample(ref, logits, args);
    const std::string what = std::string(t.name) + ", vocabulary " + std::to_string(vocab) + ", kind " + std::to_string(kind);
    check_same(&a.token, &b.token, 4, "token, " + what);
    check_same(a.ids, b.ids, "top ids, " + what);
    if (!nan) check_same(a.z, b.z, "logits, " + what);
  }
}

void test_table(const KernelTable& t, const KernelTable& ref) {
  for (KVType type : {KVType::f32, KVType::bf16, KVType::bf16_v8, KVType::i8})
    for (int dim : {8, 16, 24, 64, 80, 256})
      for (int rows : {1, 17, 70, 300}) test_attention(t, ref, {6, 2, dim, rows > 100 ? 90 : 0, 0.2f, rows == 17 ? 20.0f : 0.0f}, type, rows);
  for (size_t vocab : {1, 15, 16, 33, 300, 5000})
    for (bool nan : {false, true}) test_sampler(t, ref, vocab, nan);
  std::printf("%s: rope, KV write, attention and sampler done\n", t.name);
}

}  // namespace

int main() {
  const KernelTable& ref = *kernels_reference();
  for (const char* name : {"reference", "portable", "avx2", "avx512_vnni", "avx512_bf16"})
    if (const KernelTable* t = kernels_by_name(name)) test_table(*t, ref);
  if (failures) std::fprintf(stderr, "%d checks failed\n", failures);
  return failures ? 1 : 0;
}
