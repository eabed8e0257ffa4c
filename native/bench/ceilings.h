// What this machine can do at most, measured: int8 products per second and bytes read per second.
#pragma once
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <functional>
#include <thread>
#include <vector>

namespace calstack::bench {

inline double seconds_now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Seconds of the fastest of `tries` runs of work(thread) on all threads.
inline double best_of(int tries, int threads, const std::function<void(int)>& work) {
  double best = 1e30;
  for (int i = 0; i < tries; ++i) {
    const double start = seconds_now();
    std::vector<std::thread> others;
    for (int t = 1; t < threads; ++t) others.emplace_back(work, t);
    work(0);
    for (auto& t : others) t.join();
    best = std::min(best, seconds_now() - start);
  }
  return best;
}

// GOP/s of int8 products over registers, with the widest product this machine has.
double int8_gops(int threads);

// A buffer much larger than the caches, read with prefetches; each thread reads one part of it.
class ReadCeiling {
 public:
  explicit ReadCeiling(size_t bytes);
  ~ReadCeiling();
  ReadCeiling(const ReadCeiling&) = delete;
  ReadCeiling& operator=(const ReadCeiling&) = delete;
  double gbs(int threads) const;

 private:
  char* data_;
  size_t bytes_;
};

}  // namespace calstack::bench
