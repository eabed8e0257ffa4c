#include "calstack/thread_pool.h"

#include "thread_parts.h"

namespace calstack {

ThreadPool::ThreadPool(int threads)
    : threads_(std::max(threads, 1)),
      lanes_(std::make_unique<Lane[]>(static_cast<size_t>(threads_))),
      seats_(std::make_unique<Seat[]>(static_cast<size_t>(threads_))) {
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
  post(n, chunks, fn, ctx);
  if (sleepers_.load(std::memory_order_relaxed) > 0) wake();
  Taken first{};
  int units = 0;
  if (take_own(lanes_[0], first)) {
    first.fn(ctx, first.begin, first.end, 0);
    units = first.end - first.begin;
  }
  // A worker that fell asleep just before it could see the phase: seen here, when the fence has nothing left to wait for.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_relaxed) > 0) wake();
  units += work(0);
  expected_ += static_cast<uint32_t>(n - units);
  wait_done(expected_);
}

void ThreadPool::wake() {
  epoch_.fetch_add(1, std::memory_order_seq_cst);
  futex_wake(epoch_);
}

// The caller's own range comes last: nobody takes from it before the others have theirs.
void ThreadPool::post(int n, Chunking chunks, Fn fn, void* ctx) {
  if (parked_.load(std::memory_order_relaxed)) parked_.store(false, std::memory_order_relaxed);
  ++generation_;
  for (int w = threads_ - 1; w >= 0; --w) {
    Lane& lane = lanes_[static_cast<size_t>(w)];
    lane.fn.store(fn, std::memory_order_relaxed);
    lane.ctx.store(ctx, std::memory_order_relaxed);
    lane.min.store(std::max(chunks.min, 1), std::memory_order_relaxed);
    lane.max.store(std::max(chunks.max, 1), std::memory_order_relaxed);
    const Range r = range_of(n, w);
    lane.range.store(pack(generation_, r.begin, r.end), std::memory_order_release);
  }
}

// The generation in the word makes a chunk of a later phase impossible to take with this phase's numbers.
bool ThreadPool::take_own(Lane& lane, Taken& out) {
  uint64_t range = lane.range.load(std::memory_order_acquire);
  for (;;) {
    const int begin = begin_of(range), left = end_of(range) - begin;
    if (left <= 0) return false;
    const int n = chunk(left, lane.min.load(std::memory_order_relaxed), lane.max.load(std::memory_order_relaxed));
    if (lane.range.compare_exchange_weak(range, range + static_cast<uint64_t>(n), std::memory_order_acq_rel, std::memory_order_acquire)) {
      out = {lane.fn.load(std::memory_order_relaxed), lane.ctx.load(std::memory_order_relaxed), begin, begin + n};
      return true;
    }
  }
}

bool ThreadPool::steal(int worker, Taken& out) {
  for (int i = 1; i < threads_; ++i) {
    Lane& lane = lanes_[static_cast<size_t>((worker + i) % threads_)];
    uint64_t range = lane.range.load(std::memory_order_acquire);
    for (;;) {
      const int end = end_of(range), left = end - begin_of(range);
      if (left <= 0) break;
      const int n = chunk(left, lane.min.load(std::memory_order_relaxed), lane.max.load(std::memory_order_relaxed));
      const uint64_t less = range - (static_cast<uint64_t>(n) << kBits);
      if (lane.range.compare_exchange_weak(range, less, std::memory_order_acq_rel, std::memory_order_acquire)) {
        out = {lane.fn.load(std::memory_order_relaxed), lane.ctx.load(std::memory_order_relaxed), end - n, end};
        return true;
      }
    }
  }
  return false;
}

int ThreadPool::work(int worker) {
  int units = 0;
  Taken chunk{};
  while (take_own(lanes_[static_cast<size_t>(worker)], chunk) || steal(worker, chunk)) {
    chunk.fn(chunk.ctx, chunk.begin, chunk.end, worker);
    units += chunk.end - chunk.begin;
  }
  return units;
}

void ThreadPool::worker_loop(int worker) {
  const Lane& own = lanes_[static_cast<size_t>(worker)];
  while (!stop_.load(std::memory_order_acquire)) {
    const uint64_t seen = own.range.load(std::memory_order_acquire);
    const int units = work(worker);
    if (units == 0) {
      if (begin_of(seen) >= end_of(seen)) idle(own, seen);
      continue;
    }
    done_.fetch_add(static_cast<uint32_t>(units), std::memory_order_seq_cst);
    if (waiting_.load(std::memory_order_seq_cst) != 0) futex_wake(done_);
  }
}

// Until the worker's range changes: spin at most kSpinNs, then sleep.
void ThreadPool::idle(const Lane& own, uint64_t seen) {
  const int64_t until = now_ns() + kSpinNs;
  for (int i = 1; own.range.load(std::memory_order_acquire) == seen; ++i) {
    if (stop_.load(std::memory_order_relaxed)) return;
    if (i % 16 == 0 && (parked_.load(std::memory_order_relaxed) || now_ns() > until)) return sleep(own, seen);
    pause();
  }
}

void ThreadPool::sleep(const Lane& own, uint64_t seen) {
  const uint32_t epoch = epoch_.load(std::memory_order_seq_cst);
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  if (own.range.load(std::memory_order_seq_cst) == seen && !stop_.load(std::memory_order_seq_cst)) futex_wait(epoch_, epoch);
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
