// What this machine can do at most, measured: int8 products per second and bytes read per second. The bound of every roofline.
#pragma once
#include <cstddef>
#include <functional>
#include <vector>

#include "calstack/kernels.h"

namespace calstack {

// Seconds of `tries` runs of work(thread) on `threads` threads, started anew for each run, fastest first.
std::vector<double> times_of(int tries, int threads, const std::function<void(int)>& work);
double best_of(int tries, int threads, const std::function<void(int)>& work);

// GOP/s of int8 products over registers, by the instructions that `table` uses (a product and its addition count as two).
double int8_peak_gops(const KernelTable& table, int threads);

// A buffer read with prefetches; each thread reads one part of it, a few times over. Two patterns: prefetches half a page ahead, and as far
// ahead as the GEMV's; the median of each, and the better of the two counts.
class ReadCeiling {
 public:
  explicit ReadCeiling(size_t bytes);
  ~ReadCeiling();
  ReadCeiling(const ReadCeiling&) = delete;
  ReadCeiling& operator=(const ReadCeiling&) = delete;
  double gbs(const KernelTable& table, int threads) const;

 private:
  char* data_;
  size_t bytes_;
};

}  // namespace calstack
