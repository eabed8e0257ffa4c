// Attention kernels alone: prefill GFLOP/s per thread, decode GB/s of cache read. Usage: attention_bench [isa] [threads]
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "calstack/kernels.h"

using namespace calstack;

namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// A cache of `layers` layers, so that decode reads it from memory as a model does.
struct Cache {
  AttnShape s;
  int context, layers;
  size_t layer_bytes, block_bytes;
  std::vector<uint8_t> bytes;
  std::vector<int32_t> table;
  const int32_t* lane;

  Cache(int heads, int kv_heads, int dim, int positions, int layer_count, bool bf16)
      : s{heads, kv_heads, dim, 0, 0.125f, 0.0f}, context(positions), layers(layer_count) {
    layer_bytes = static_cast<size_t>(2 * kv_heads * dim * kBlockPositions) * (bf16 ? 2 : 4);
    block_bytes = layer_bytes * static_cast<size_t>(layers);
    const int blocks = (positions + kBlockPositions - 1) / kBlockPositions;
    bytes.resize(block_bytes * static_cast<size_t>(blocks) + 64);
    std::mt19937 rng(1);
    if (bf16) {
      for (size_t i = 0; i + 1 < bytes.size(); i += 2) bytes[i] = static_cast<uint8_t>(rng()), bytes[i + 1] = static_cast<uint8_t>(0x3e | (rng() & 0x80));
    } else {
      for (size_t i = 0; i + 3 < bytes.size(); i += 4) bytes[i + 3] = static_cast<uint8_t>(0x3e | (rng() & 0x80));
    }
    for (int i = 0; i < blocks; ++i) table.push_back(i);
    lane = table.data();
    type = bf16 ? KVType::bf16 : KVType::f32;
  }
  KVType type;
  KVView view(int layer) const {
    uint8_t* base = const_cast<uint8_t*>(bytes.data());
    base += (64 - reinterpret_cast<uintptr_t>(base) % 64) % 64;
    return {type, base, block_bytes, layer_bytes * static_cast<size_t>(layer), s.kv_heads, s.head_dim, &lane};
  }
};

double best_seconds(int threads, int repeats, const std::function<void(int)>& work) {
  double best = 1e9;
  for (int r = 0; r < repeats; ++r) {
    const double t0 = now();
    std::vector<std::thread> team;
    for (int t = 1; t < threads; ++t) team.emplace_back(work, t);
    work(0);
    for (auto& t : team) t.join();
    best = std::min(best, now() - t0);
  }
  return best;
}

std::vector<float> random_rows(size_t n) {
  std::mt19937 rng(2);
  std::normal_distribution<float> normal;
  std::vector<float> x(n);
  for (float& v : x) v = normal(rng);
  return x;
}

void prefill(const KernelTable& k, int threads, int heads, int kv_heads, int dim, int context) {
  const Cache cache(heads, kv_heads, dim, context, 1, true);
  const size_t xs = static_cast<size_t>((heads + 2 * kv_heads) * dim), os = static_cast<size_t>(heads * dim);
  const std::vector<float> qkv = random_rows(xs * static_cast<size_t>(context));
  std::vector<float> out(os * static_cast<size_t>(context));
  std::vector<int32_t> positions(static_cast<size_t>(context));
  for (int i = 0; i < context; ++i) positions[static_cast<size_t>(i)] = i;
  std::vector<std::vector<uint8_t>> scratch(static_cast<size_t>(threads), std::vector<uint8_t>(attention_scratch_bytes(cache.s)));
  const KVView view = cache.view(0);
  const double s = best_seconds(threads, 5, [&](int t) {
    for (int r0 = 32 * t; r0 < context; r0 += 32 * threads)
      for (int h = 0; h < kv_heads; ++h)
        k.attention(qkv.data(), xs, cache.s, view, 0, positions.data(), h, r0, std::min(r0 + 32, context), out.data(), os, scratch[static_cast<size_t>(t)].data());
  });
  const double flop = 4.0 * heads * dim * (0.5 * context * (context + 1.0));
  std::printf("prefill %5d  heads %d/%d dim %3d  %8.3f ms per layer  %7.1f GFLOP/s\n", context, heads, kv_heads, dim, s * 1e3, flop / s / 1e9);
}

void decode(const KernelTable& k, int threads, int heads, int kv_heads, int dim, int context, bool bf16) {
  const int layers = 30;
  const Cache cache(heads, kv_heads, dim, context, layers, bf16);
  const size_t xs = static_cast<size_t>((heads + 2 * kv_heads) * dim), group = static_cast<size_t>(heads / kv_heads);
  const std::vector<float> qkv = random_rows(xs);
  const int splits = (context + kSplitKeys - 1) / kSplitKeys;
  std::vector<float> ml(static_cast<size_t>(splits * heads) * 2), o(static_cast<size_t>(splits * heads * dim)), out(static_cast<size_t>(heads * dim));
  std::vector<std::vector<uint8_t>> scratch(static_cast<size_t>(threads), std::vector<uint8_t>(attention_scratch_bytes(cache.s)));
  const double s = best_seconds(threads, 9, [&](int t) {
    for (int layer = 0; layer < layers; ++layer) {
      const KVView view = cache.view(layer);
      for (int i = t; i < splits * kv_heads; i += threads) {
        const int h = i % kv_heads, split = i / kv_heads;
        const size_t at = static_cast<size_t>(h * splits + split) * group;
        k.attention_split(qkv.data(), xs, cache.s, view, 0, context - 1, h, 0, split, ml.data() + 2 * at, o.data() + at * static_cast<size_t>(dim), scratch[static_cast<size_t>(t)].data());
      }
    }
    if (t == 0)
      for (int layer = 0; layer < layers; ++layer)
        for (int h = 0; h < kv_heads; ++h) {
          const size_t at = static_cast<size_t>(h * splits) * group;
          k.attention_merge(cache.s, ml.data() + 2 * at, o.data() + at * static_cast<size_t>(dim), splits, h, out.data());
        }
  });
  const double bytes = static_cast<double>(layers) * 2 * kv_heads * dim * context * (bf16 ? 2 : 4);
  std::printf("decode  %5d  heads %d/%d dim %3d %s  %8.3f ms for %d layers  %6.1f MB  %6.1f GB/s\n", context, heads, kv_heads, dim, bf16 ? "bf16" : "f32 ", s * 1e3,
              layers, bytes / 1e6, bytes / s / 1e9);
}

}  // namespace

int main(int argc, char** argv) {
  const KernelTable* k = kernels_by_name(argc > 1 ? argv[1] : "");
  const int threads = argc > 2 ? std::atoi(argv[2]) : 2;
  if (!k) return std::fprintf(stderr, "attention_bench: no such instruction set on this machine\n"), 2;
  std::printf("%s, %d threads\n", k->name, threads);
  for (int context : {128, 512, 2048, 8000}) prefill(*k, threads, 9, 3, 64, context);
  prefill(*k, threads, 16, 8, 128, 2048);
  for (int context : {64, 1024, 8000}) decode(*k, threads, 9, 3, 64, context, true);
  decode(*k, threads, 9, 3, 64, 8000, false);
  decode(*k, threads, 16, 8, 128, 2000, true);
  return 0;
}
