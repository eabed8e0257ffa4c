#include "bench/ceilings.h"

#include <cstdlib>
#include <cstring>

#include "simd/simd.h"

namespace calstack::bench {
namespace {

using namespace calstack::CALSTACK_ISA;

constexpr int kChains = 12;  // independent sums: more than latency times products per cycle

double int8_gops(int threads) {
  constexpr int loops = 4'000'000;
  const auto work = [](int) {
    I32x16 acc[kChains];
    for (auto& a : acc) a = I32x16::broadcast(1);
    I32x16 u = I32x16::broadcast(0x03030303), s = I32x16::broadcast(0x02020202);
    for (int i = 0; i < loops; ++i)
      for (auto& a : acc) a = dot4<true>(a, u, s);
    for (int i = 1; i < kChains; ++i) acc[0] = acc[0] + acc[i];
    volatile int sink = sum_lanes(acc[0]);
    (void)sink;
  };
  return threads * (double)loops * kChains * 128 / best_of(6, threads, work) / 1e9;
}

double read_gbs(int threads, size_t bytes) {
  char* p = static_cast<char*>(std::aligned_alloc(4096, bytes));
  std::memset(p, 1, bytes);
  const auto work = [&](int t) {
    const size_t from = bytes / (size_t)threads / 256 * 256 * (size_t)t, count = bytes / (size_t)threads / 256 * 256;
    I32x16 acc[4];
    for (auto& a : acc) a = I32x16::zero();
    for (size_t i = from; i < from + count; i += 256) {
      for (int j = 0; j < 4; ++j) {
        prefetch(p + i + 4096 + 64 * j);
        acc[j] = acc[j] + I32x16::load(p + i + 64 * j);
      }
    }
    volatile int sink = sum_lanes(acc[0] + acc[1] + acc[2] + acc[3]);
    (void)sink;
  };
  const double best = (double)bytes / best_of(12, threads, work) / 1e9;
  std::free(p);
  return best;
}

}  // namespace

Ceilings measure_ceilings(int threads, size_t stream) { return {int8_gops(threads), read_gbs(threads, stream)}; }

}  // namespace calstack::bench
