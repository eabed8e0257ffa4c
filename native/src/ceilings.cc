#include "calstack/ceilings.h"

#include <sys/mman.h>

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

constexpr size_t kHugePage = 2 << 20;

// The GEMV's weights: whole blocks of a layer of 576 inputs. A thread's part is whole blocks and whole steps of the plain read.
constexpr int kInputs = 576, kGroup = 32, kRepeats = 4;
constexpr size_t kBlock = kInputs / kGroup * (8 * kGroup + 64), kUnit = 2 * kBlock;
static_assert(kUnit % 256 == 0);

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

// Whole huge pages, as parameters are.
ReadCeiling::ReadCeiling(size_t bytes) : bytes_((bytes + kHugePage - 1) / kHugePage * kHugePage) {
  data_ = static_cast<char*>(std::aligned_alloc(kHugePage, bytes_));
  if (!data_) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
  madvise(data_, bytes_, MADV_HUGEPAGE);
#endif
  std::memset(data_, 1, bytes_);
}

ReadCeiling::~ReadCeiling() { std::free(data_); }

double ReadCeiling::seconds(int threads, const std::function<void(size_t from, size_t bytes)>& pass) const {
  const size_t part = bytes_ / static_cast<size_t>(threads) / kUnit * kUnit;
  const auto times = times_of(5, threads, [&](int t) {
    for (int r = 0; r < kRepeats; ++r) pass(part * static_cast<size_t>(t), part);
  });
  return times[2] / (static_cast<double>(kRepeats) * static_cast<double>(part) * threads);
}

double ReadCeiling::gbs(const KernelTable& table, int threads) const {
  const CeilingLoops loops = loops_of(table);
  double a_byte = 1e30;
  for (const size_t ahead : {size_t{2048}, size_t{8192}})
    a_byte = std::min(a_byte, seconds(threads, [&](size_t from, size_t bytes) { loops.read(data_ + from, bytes, ahead); }));
  std::vector<int8_t> codes(kInputs, 1);
  std::vector<float> scales(2 * kInputs / kGroup, 1.0f), out(bytes_ / kBlock * kLane + kLane);
  std::vector<int32_t> sums(kInputs / kGroup, 1);
  const QuantRows x{codes.data(), scales.data(), scales.data() + kInputs / kGroup, sums.data(), kInputs, kGroup};
  a_byte = std::min(a_byte, seconds(threads, [&](size_t from, size_t bytes) {
    const int blocks = static_cast<int>(bytes / kBlock);
    const Weight w{reinterpret_cast<const uint8_t*>(data_ + from), WFmt::w4a8, blocks * kLane, kInputs, kGroup, true};
    table.linear_q(w, x, 1, nullptr, Epilogue::store, Act::silu, out.data() + from / kBlock * kLane, 0, 0, blocks);
  }));
  return 1e-9 / a_byte;
}

}  // namespace calstack
