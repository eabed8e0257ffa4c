#include "calstack/ceilings.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "kernel_parts.h"

namespace calstack {
namespace {

double seconds_now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

CeilingLoops loops_of(const KernelTable& table) {
  const std::string name = table.name;
#if defined(CALSTACK_X86)
  if (name == "avx512_vnni" || name == "avx512_bf16") return avx512::ceiling_loops();
  if (name == "avx2_vnni") return avx2_vnni::ceiling_loops();
  if (name == "avx2") return avx2::ceiling_loops();
#endif
  return portable::ceiling_loops();
}

}  // namespace

std::vector<double> times_of(int tries, int threads, const std::function<void(int)>& work) {
  std::vector<double> times;
  for (int i = 0; i < tries; ++i) {
    const double start = seconds_now();
    std::vector<std::thread> others;
    for (int t = 1; t < threads; ++t) others.emplace_back(work, t);
    work(0);
    for (auto& t : others) t.join();
    times.push_back(seconds_now() - start);
  }
  std::sort(times.begin(), times.end());
  return times;
}

double best_of(int tries, int threads, const std::function<void(int)>& work) { return times_of(tries, threads, work).front(); }

double int8_peak_gops(const KernelTable& table, int threads) {
  const CeilingLoops loops = loops_of(table);
  const double once = best_of(1, 1, [&](int) { loops.products(1000); });
  const long repeats = std::max(1L, static_cast<long>(0.01 / once));  // about 10 ms
  const double seconds = best_of(6, threads, [&](int) {
    for (long i = 0; i < repeats; ++i) loops.products(1000);
  });
  return 1000.0 * loops.operations * static_cast<double>(repeats) * threads / seconds / 1e9;
}

ReadCeiling::ReadCeiling(size_t bytes)
    : data_(static_cast<char*>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096))), bytes_(bytes) {
  if (!data_) throw std::bad_alloc();
  std::memset(data_, 1, bytes);
}

ReadCeiling::~ReadCeiling() { std::free(data_); }

double ReadCeiling::gbs(const KernelTable& table, int threads) const {
  constexpr int repeats = 4;
  const CeilingLoops loops = loops_of(table);
  const size_t part = bytes_ / static_cast<size_t>(threads) / 256 * 256;
  double seconds = 1e30;
  for (const size_t ahead : {size_t{2048}, size_t{8192}}) {
    const auto times = times_of(5, threads, [&](int t) {
      for (int r = 0; r < repeats; ++r) loops.read(data_ + part * static_cast<size_t>(t), part, ahead);
    });
    seconds = std::min(seconds, times[2]);
  }
  return repeats * static_cast<double>(part) * threads / seconds / 1e9;
}

}  // namespace calstack
