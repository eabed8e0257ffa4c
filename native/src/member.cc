// Phases inside ThreadPool::together. A range word holds the generation of its phase: whoever comes first, its owner or a thief, moves it
// there, so that a thread that is late finds what is left of its part, or that the phase is over.
#include "calstack/thread_pool.h"
#include "thread_parts.h"

namespace calstack {
namespace {

constexpr int64_t kPatienceNs = 2'000;  // then a waiting thread takes from others that are at work: looking slows them down

// Generations of two words apart: positive when a is later.
int later(uint64_t a, uint64_t b) { return static_cast<int>(static_cast<int64_t>((a - b) << (2 * kBits)) >> (2 * kBits)); }
uint64_t generation_of(uint64_t range) { return range >> (2 * kBits); }

}  // namespace

void Ahead::touch() {
  Run& run = runs_[next_];
  const size_t bytes = std::min<size_t>(run.bytes, 256);
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(run.at + i);
  run.at += bytes;
  run.bytes -= bytes;
  if (run.bytes == 0) ++next_;
}

ThreadPool::Range Member::first_range(int n, Chunking chunks, int of) const {
  if (n > chunks.min) return pool_.range_of(n, of);
  return {0, of == 0 ? n : 0};
}

void Member::run(int n, Chunking chunks, ThreadPool::Fn fn, void* ctx) {
  if (pool_.threads_ == 1) {
    if (n > 0) fn(ctx, 0, n, 0);
    return;
  }
  if (n > kMostUnits) chunks.min = n;  // never in practice: a phase has thousands of units
  ++generation_;
  expected_ += static_cast<uint64_t>(n);
  ThreadPool::Range taken{};
  int units = 0;
  while (take_own(n, chunks, taken)) {
    fn(ctx, taken.begin, taken.end, index_);
    units += taken.end - taken.begin;
  }
  publish(units);
  int64_t from = 0, looked = 0;
  const auto help = [&](bool absent) {
    if (!steal(n, chunks, absent, taken)) return false;
    fn(ctx, taken.begin, taken.end, index_);
    publish(taken.end - taken.begin);
    return true;
  };
  for (int i = 1; !finished(); ++i) {
    if (!ahead.empty()) ahead.touch();
    else pause();
    if (i % 16 != 0) continue;
    const int64_t now = now_ns();
    if (from == 0) from = looked = now;
    const bool patient = now - looked <= kPatienceNs;
    if (!patient) looked = now;
    if (i > 16 && help(patient)) from = 0;
    if (from == 0) continue;
    if (now - from > kSpinNs) sleep();
  }
}

bool Member::take_own(int n, Chunking chunks, ThreadPool::Range& out) {
  std::atomic<uint64_t>& word = pool_.seats_[static_cast<size_t>(index_)].range;
  uint64_t range = word.load(std::memory_order_acquire);
  for (;;) {
    const int apart = later(generation_of(range), generation_);
    if (apart > 0) return false;
    const ThreadPool::Range all = apart == 0 ? ThreadPool::Range{begin_of(range), end_of(range)} : first_range(n, chunks, index_);
    const int left = all.end - all.begin;
    if (left <= 0) return false;
    const int take = chunk(left, chunks.min, chunks.max);
    if (word.compare_exchange_weak(range, pack(generation_, all.begin + take, all.end), std::memory_order_acq_rel, std::memory_order_acquire)) {
      out = {all.begin, all.begin + take};
      return true;
    }
  }
}

// Half of what a thread has left; of one that has not come to this phase (`absent`: only of such) as much as it would take itself.
bool Member::steal(int n, Chunking chunks, bool absent, ThreadPool::Range& out) {
  for (int i = 1; i < pool_.threads_; ++i) {
    const int victim = (index_ + i) % pool_.threads_;
    std::atomic<uint64_t>& word = pool_.seats_[static_cast<size_t>(victim)].range;
    uint64_t range = word.load(std::memory_order_acquire);
    for (;;) {
      const int apart = later(generation_of(range), generation_);
      if (apart > 0) return false;
      const ThreadPool::Range all = apart == 0 ? ThreadPool::Range{begin_of(range), end_of(range)} : first_range(n, chunks, victim);
      const int left = all.end - all.begin;
      if (left <= 0 || (absent && apart == 0)) break;
      const int take = apart < 0 ? chunk(left, chunks.min, chunks.max) : std::min(std::max(left / 2, chunks.min), left);
      if (word.compare_exchange_weak(range, pack(generation_, all.begin, all.end - take), std::memory_order_acq_rel, std::memory_order_acquire)) {
        out = {all.end - take, all.end};
        return true;
      }
    }
  }
  return false;
}

void Member::publish(int units) {
  if (units == 0) return;
  std::atomic<uint64_t>& done = pool_.seats_[static_cast<size_t>(index_)].done;
  done.store(done.load(std::memory_order_relaxed) + static_cast<uint64_t>(units), std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (pool_.seat_sleepers_.load(std::memory_order_relaxed) == 0) return;
  pool_.seat_epoch_.fetch_add(1, std::memory_order_seq_cst);
  futex_wake(pool_.seat_epoch_);
}

bool Member::finished() const {
  uint64_t sum = 0;
  for (int w = 0; w < pool_.threads_; ++w) sum += pool_.seats_[static_cast<size_t>(w)].done.load(std::memory_order_acquire);
  return sum >= expected_;
}

void Member::sleep() {
  pool_.seat_sleepers_.fetch_add(1, std::memory_order_seq_cst);
  const uint32_t epoch = pool_.seat_epoch_.load(std::memory_order_seq_cst);
  if (!finished()) futex_wait(pool_.seat_epoch_, epoch);
  pool_.seat_sleepers_.fetch_sub(1, std::memory_order_seq_cst);
}

}  // namespace calstack
