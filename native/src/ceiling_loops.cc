// The loops that ceilings.cc times. Once per instruction set.
#include "kernel_parts.h"
#include "simd/simd.h"

namespace calstack {
namespace CALSTACK_ISA {
namespace {

constexpr int kChains = kVectorRegisters == 32 ? 12 : 6;  // independent sums: more than latency times products per cycle

int products(long loops) {
  I32x16 acc[kChains];
  for (auto& a : acc) a = I32x16::broadcast(1);
  const I32x16 u = I32x16::broadcast(0x03030303), s = I32x16::broadcast(0x02020202);
  for (long i = 0; i < loops; ++i)
    for (auto& a : acc) a = dot4<true>(a, u, s);
  for (int i = 1; i < kChains; ++i) acc[0] = acc[0] + acc[i];
  return sum_lanes(acc[0]);
}

// `bytes` is a multiple of 256; prefetches run `ahead` bytes before the loads.
int read(const char* p, size_t bytes, size_t ahead) {
  I32x16 acc[4];
  for (auto& a : acc) a = I32x16::zero();
  for (const char* end = p + bytes; p < end; p += 256)
    for (int j = 0; j < 4; ++j) {
      prefetch(p + ahead + 64 * (size_t)j);
      acc[j] = acc[j] + I32x16::load(p + 64 * j);
    }
  return sum_lanes(acc[0] + acc[1] + acc[2] + acc[3]);
}

}  // namespace

CeilingLoops ceiling_loops() { return {products, kChains * 128.0, read}; }

}  // namespace CALSTACK_ISA
}  // namespace calstack
