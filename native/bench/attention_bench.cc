// Attention kernels alone: prefill GFLOP/s (what is seen, not what is computed), decode GB/s of cache read. Usage: attention_bench [isa] [threads]
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <random>
#include <vector>

#include "calstack/ceilings.h"
#include "calstack/kernels.h"
#include "kv_layout.h"

using namespace calstack;

namespace {

// A cache of `layers` layers, so that decode reads it from memory as a model does.
struct Cache {
  AttnShape s;
  int context, layers;
  size_t layer_bytes, block_bytes;
  uint8_t* bytes;
  size_t size;
  std::vector<int32_t> table;
  const int32_t* lane;

  Cache(int heads, int kv_heads, int dim, int positions, int layer_count, KVType kv)
      : s{heads, kv_heads, dim, 0, 0.125f, 0.0f}, context(positions), layers(layer_count) {
    layer_bytes = KVPlaces(kv, kv_heads, dim).bytes();
    block_bytes = layer_bytes * static_cast<size_t>(layers);
    const int blocks = (positions + kBlockPositions - 1) / kBlockPositions;
    size = block_bytes * static_cast<size_t>(blocks);
    bytes = static_cast<uint8_t*>(mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (bytes == MAP_FAILED) throw std::bad_alloc();
    madvise(bytes, size, MADV_HUGEPAGE);  // as the KV pool does
    std::mt19937 rng(1);
    const size_t step = kv == KVType::f32 ? 4 : 2;  // scales of int8 planes come out near 1/8 too
    for (size_t i = 0; i < size; i += step) bytes[i + step - 1] = static_cast<uint8_t>(0x3e | (rng() & 0x80));  // about 1/8, either sign
    for (int i = 0; i < blocks; ++i) table.push_back(i);
    lane = table.data();
    type = kv;
  }
  ~Cache() { munmap(bytes, size); }
  Cache(const Cache&) = delete;
  Cache& operator=(const Cache&) = delete;
  KVType type;
  KVView view(int layer) const {
    return {type, bytes, block_bytes, layer_bytes * static_cast<size_t>(layer), s.kv_heads, s.head_dim, &lane};
  }
};

std::vector<float> random_rows(size_t n) {
  std::mt19937 rng(2);
  std::normal_distribution<float> normal;
  std::vector<float> x(n);
  for (float& v : x) v = normal(rng);
  return x;
}

void prefill(const KernelTable& k, int threads, int heads, int kv_heads, int dim, int context) {
  const Cache cache(heads, kv_heads, dim, context, 1, KVType::bf16);
  const size_t xs = static_cast<size_t>((heads + 2 * kv_heads) * dim), os = static_cast<size_t>(heads * dim);
  const std::vector<float> qkv = random_rows(xs * static_cast<size_t>(context));
  std::vector<float> out(os * static_cast<size_t>(context));
  std::vector<int32_t> positions(static_cast<size_t>(context));
  for (int i = 0; i < context; ++i) positions[static_cast<size_t>(i)] = i;
  std::vector<std::vector<uint8_t>> scratch(static_cast<size_t>(threads), std::vector<uint8_t>(attention_scratch_bytes(cache.s)));
  const KVView view = cache.view(0);
  const double s = best_of(5, threads, [&](int t) {
    for (int r0 = 32 * t; r0 < context; r0 += 32 * threads)
      for (int h = 0; h < kv_heads; ++h)
        k.attention(qkv.data(), xs, cache.s, view, 0, positions.data(), h, r0, std::min(r0 + 32, context), out.data(), os, scratch[static_cast<size_t>(t)].data());
  });
  const double flop = 4.0 * heads * dim * (0.5 * context * (context + 1.0));
  std::printf("prefill %5d  heads %d/%d dim %3d  %8.3f ms per layer  %7.1f GFLOP/s\n", context, heads, kv_heads, dim, s * 1e3, flop / s / 1e9);
}

constexpr const char* kTypes[] = {"f32", "bf16", "bf16_v8", "i8"};

void decode(const KernelTable& k, int threads, int heads, int kv_heads, int dim, int context, KVType type) {
  const int layers = 30;
  const Cache cache(heads, kv_heads, dim, context, layers, type);
  const size_t xs = static_cast<size_t>((heads + 2 * kv_heads) * dim);
  const std::vector<float> qkv = random_rows(xs);
  const int splits = (context + kSplitKeys - 1) / kSplitKeys;
  std::vector<float> ml(static_cast<size_t>(splits * heads) * 2), o(static_cast<size_t>(splits * heads * dim)), out(static_cast<size_t>(heads * dim));
  std::vector<std::vector<uint8_t>> scratch(static_cast<size_t>(threads), std::vector<uint8_t>(attention_scratch_bytes(cache.s)));
  const double s = best_of(9, threads, [&](int t) {
    const int units = splits * kv_heads, end = units * (t + 1) / threads;
    for (int layer = 0; layer < layers; ++layer) {
      const KVView view = cache.view(layer);
      for (int u = units * t / threads, h1 = 0; u < end; u += h1 - u % kv_heads) {
        const size_t split = static_cast<size_t>(u / kv_heads);
        h1 = std::min(kv_heads, u % kv_heads + end - u);
        k.attention_split(qkv.data(), xs, cache.s, view, 0, context - 1, u % kv_heads, h1, 0, u / kv_heads, ml.data() + split * 2 * static_cast<size_t>(heads),
                          o.data() + split * static_cast<size_t>(heads * dim), scratch[static_cast<size_t>(t)].data());
      }
    }
    if (t == 0)
      for (int layer = 0; layer < layers; ++layer) k.attention_merge(cache.s, ml.data(), o.data(), splits, 0, heads, out.data());
  });
  const double bytes = static_cast<double>(layers) * static_cast<double>(cache.layer_bytes) / kBlockPositions * context;
  const double gbs = bytes / s / 1e9, limit = ReadCeiling(static_cast<size_t>(bytes)).gbs(k, threads);
  std::printf("decode  %5d  heads %d/%d dim %3d %s  %8.3f ms for %d layers  %6.1f MB  %6.1f GB/s, %3.0f %% of a linear read of as much\n", context, heads,
              kv_heads, dim, kTypes[static_cast<int>(type)], s * 1e3, layers, bytes / 1e6, gbs, 100 * gbs / limit);
}

}  // namespace

int main(int argc, char** argv) {
  const KernelTable* k = kernels_by_name(argc > 1 ? argv[1] : "");
  const int threads = argc > 2 ? std::atoi(argv[2]) : 2;
  if (!k) return std::fprintf(stderr, "attention_bench: no such instruction set on this machine\n"), 2;
  std::printf("%s, %d threads\n", k->name, threads);
  for (int context : {128, 512, 2048, 8000}) prefill(*k, threads, 9, 3, 64, context);
  prefill(*k, threads, 16, 8, 128, 2048);
  for (int context : {64, 1024, 8000}) decode(*k, threads, 9, 3, 64, context, KVType::bf16);
  for (KVType type : {KVType::f32, KVType::bf16_v8, KVType::i8}) decode(*k, threads, 9, 3, 64, 8000, type);
  decode(*k, threads, 16, 8, 128, 2000, KVType::bf16);
  return 0;
}
