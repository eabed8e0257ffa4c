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

// A buffer read over and over, one part of it by each thread, in three patterns: with prefetches half a page ahead and two pages ahead,
// and by the GEMV itself, which takes it for weights. The median of each; the best of the three counts.
class ReadCeiling {
 public:
  explicit ReadCeiling(size_t bytes);
  ~ReadCeiling();
  ReadCeiling(const ReadCeiling&) = delete;
  ReadCeiling& operator=(const ReadCeiling&) = delete;
  double gbs(const KernelTable& table, int threads) const;

 private:
  double seconds(int threads, const std::function<void(size_t from, size_t bytes)>& pass) const;

  char* data_ = nullptr;
  size_t bytes_;
};

}  // namespace calstack
