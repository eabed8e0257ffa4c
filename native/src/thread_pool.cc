#include "calstack/thread_pool.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>

namespace calstack {
namespace {

constexpr int64_t kSpinNs = 50'000;  // a barrier costs under 1 us while threads run; longer waits sleep
constexpr int kBits = 20;
constexpr uint64_t kMask = (1u << kBits) - 1;
constexpr int kMostUnits = static_cast<int>(kMask);

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void futex_wait(std::atomic<uint32_t>& word, uint32_t expected) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

bool has_work(uint64_t state) { return (state & kMask) < ((state >> kBits) & kMask); }

}  // namespace

ThreadPool::ThreadPool(int threads) : threads_(std::max(threads, 1)) {
  workers_.reserve(static_cast<size_t>(threads_ - 1));
  for (int id = 1; id < threads_; ++id) workers_.emplace_back([this, id] { worker_loop(id); });
}

ThreadPool::~ThreadPool() {
  stop_.store(true, std::memory_order_seq_cst);
  epoch_.fetch_add(1, std::memory_order_seq_cst);
  futex_wake(epoch_);
  for (auto& t : workers_) t.join();
}

void ThreadPool::run(int n, Chunking chunks, Fn fn, void* ctx) {
  if (threads_ == 1 || n <= chunks.min) {
    if (n > 0) fn(ctx, 0, n, 0);
    return;
  }
  for (; n > kMostUnits; n -= kMostUnits) {  // never in practice: a phase has thousands of units
    fn(ctx, n - kMostUnits, n, 0);
  }
  fn_.store(fn, std::memory_order_relaxed);
  ctx_.store(ctx, std::memory_order_relaxed);
  min_.store(std::max(chunks.min, 1), std::memory_order_relaxed);
  max_.store(std::max(chunks.max, 1), std::memory_order_relaxed);
  done_.store(0, std::memory_order_relaxed);
  parked_.store(false, std::memory_order_relaxed);
  const uint64_t generation = (state_.load(std::memory_order_relaxed) >> (2 * kBits)) + 1;
  state_.store(generation << (2 * kBits) | static_cast<uint64_t>(n) << kBits, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) {
    epoch_.fetch_add(1, std::memory_order_seq_cst);
    futex_wake(epoch_);
  }
  wait_done(static_cast<uint32_t>(n - work(0)));
}

bool ThreadPool::take(Taken& out) {
  uint64_t state = state_.load(std::memory_order_acquire);
  for (;;) {
    const int next = static_cast<int>(state & kMask), total = static_cast<int>((state >> kBits) & kMask);
    if (next >= total) return false;
    const int share = (total - next) / (2 * threads_);
    const int low = min_.load(std::memory_order_relaxed), high = max_.load(std::memory_order_relaxed);
    const int size = std::min(std::max(std::min(share, high), low), total - next);
    // The generation in the word makes a chunk of a later phase impossible to take with this phase's numbers.
    if (state_.compare_exchange_weak(state, state + static_cast<uint64_t>(size), std::memory_order_acq_rel, std::memory_order_acquire)) {
      out = {next, next + size};
      return true;
    }
  }
}

int ThreadPool::work(int worker) {
  int units = 0;
  Taken chunk;
  while (take(chunk)) {
    fn_.load(std::memory_order_relaxed)(ctx_.load(std::memory_order_relaxed), chunk.begin, chunk.end, worker);
    units += chunk.end - chunk.begin;
  }
  return units;
}

void ThreadPool::worker_loop(int worker) {
  while (!stop_.load(std::memory_order_acquire)) {
    const uint64_t seen = state_.load(std::memory_order_acquire);
    const int units = work(worker);
    if (units == 0) {
      if (!has_work(seen)) idle(seen);
      continue;
    }
    done_.fetch_add(static_cast<uint32_t>(units), std::memory_order_seq_cst);
    if (waiting_.load(std::memory_order_seq_cst) != 0) futex_wake(done_);
  }
}

// Until state_ changes: spin at most kSpinNs, then sleep.
void ThreadPool::idle(uint64_t seen) {
  const int64_t until = now_ns() + kSpinNs;
  for (int i = 1; state_.load(std::memory_order_acquire) == seen; ++i) {
    if (stop_.load(std::memory_order_relaxed)) return;
    if (i % 16 == 0 && (parked_.load(std::memory_order_relaxed) || now_ns() > until)) return sleep(seen);
    pause();
  }
}

void ThreadPool::sleep(uint64_t seen) {
  const uint32_t epoch = epoch_.load(std::memory_order_seq_cst);
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  if (state_.load(std::memory_order_seq_cst) == seen && !stop_.load(std::memory_order_seq_cst)) futex_wait(epoch_, epoch);
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
}

void ThreadPool::wait_done(uint32_t target) {
  if (done_.load(std::memory_order_acquire) == target) return;
  const int64_t until = now_ns() + kSpinNs;
  for (int i = 1; done_.load(std::memory_order_acquire) != target; ++i) {
    if (i % 16 == 0 && now_ns() > until) break;
    pause();
  }
  if (done_.load(std::memory_order_acquire) == target) return;
  waiting_.store(1, std::memory_order_seq_cst);
  for (;;) {
    const uint32_t value = done_.load(std::memory_order_seq_cst);
    if (value == target) break;
    futex_wait(done_, value);
  }
  waiting_.store(0, std::memory_order_relaxed);
}

}  // namespace calstack
