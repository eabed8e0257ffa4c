#include "bench/ceilings.h"

#include <cstdlib>
#include <cstring>

#include "simd/simd.h"

namespace calstack::bench {
namespace {

using namespace calstack::CALSTACK_ISA;

constexpr int kChains = 12;  // independent sums: more than latency times products per cycle

}  // namespace

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

ReadCeiling::ReadCeiling(size_t bytes) : data_(static_cast<char*>(std::aligned_alloc(4096, bytes))), bytes_(bytes) {
  if (!data_) std::abort();
  std::memset(data_, 1, bytes);
}

ReadCeiling::~ReadCeiling() { std::free(data_); }

double ReadCeiling::gbs(int threads) const {
  constexpr int repeats = 4;
  const size_t part = bytes_ / (size_t)threads / 256 * 256;
  const auto work = [&](int t) {
    I32x16 acc[4];
    for (auto& a : acc) a = I32x16::zero();
    for (int r = 0; r < repeats; ++r)
      for (const char *p = data_ + part * (size_t)t, *end = p + part; p < end; p += 256)
        for (int j = 0; j < 4; ++j) {
          prefetch(p + 4096 + 64 * j);
          acc[j] = acc[j] + I32x16::load(p + 64 * j);
        }
    volatile int sink = sum_lanes(acc[0] + acc[1] + acc[2] + acc[3]);
    (void)sink;
  };
  return repeats * (double)part * threads / best_of(5, threads, work) / 1e9;
}

}  // namespace calstack::bench
