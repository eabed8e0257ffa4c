// What both ways of running phases share: waiting, and ranges in one word.
#pragma once
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>

#include "calstack/thread_pool.h"

namespace calstack {

constexpr int64_t kSpinNs = 50'000;  // a barrier costs under 1 us while threads run; longer waits sleep
constexpr int kBits = 20;
constexpr uint64_t kMask = (1u << kBits) - 1;
constexpr int kMostUnits = static_cast<int>(kMask);

inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline void futex_wait(std::atomic<uint32_t>& word, uint32_t expected) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

inline void futex_wake(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

inline uint64_t pack(uint64_t generation, int begin, int end) {
  return generation << (2 * kBits) | static_cast<uint64_t>(end) << kBits | static_cast<uint64_t>(begin);
}
inline int begin_of(uint64_t range) { return static_cast<int>(range & kMask); }
inline int end_of(uint64_t range) { return static_cast<int>((range >> kBits) & kMask); }

// Units of a chunk when `left` are there: few chunks, for each begins with cold streams, and a last part that others can take.
inline int chunk(int left, int low, int high) { return std::min(std::max(std::min(left - left / 4, high), low), left); }

}  // namespace calstack
