// A fork-join pool for the executor. Every thread has its own range of a phase's units, always the same for the same count, and takes
// chunks of it; one that has none left takes from the end of another's. So a preempted thread holds up nobody but the chunk in its
// hands, and threads share no cache line while they have work of their own. A phase ends when all units are done.
//
// `together` runs one function on all threads, each with its own copy of what it knows, through many phases: between two of them a
// thread waits for the others' counts alone, and meanwhile touches what it will read next.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace calstack {

struct Chunking {
  int min = 1;        // fewest units a thread takes at once
  int max = 1 << 20;  // most units a thread takes at once; between the two a chunk is half of the thread's range
};

// Memory that a thread reads next: fetched line by line while it has to wait anyway.
class Ahead {
 public:
  // Behind what is there already; more than six runs are dropped.
  void add(const void* p, size_t bytes) {
    if (count_ < kRuns && bytes != 0) runs_[count_++] = {static_cast<const char*>(p), bytes};
  }
  void clear() { count_ = next_ = 0; }
  bool empty() const { return next_ == count_; }
  void touch();  // the next few lines
  void finish() {
    while (!empty()) touch();
  }

 private:
  static constexpr int kRuns = 6;
  struct Run {
    const char* at;
    size_t bytes;
  };
  Run runs_[kRuns];
  int count_ = 0, next_ = 0;
};

class Member;

class ThreadPool {
 public:
  using Fn = void (*)(void* ctx, int begin, int end, int worker);

  // `threads` counts the caller of `run`, which is worker 0; throws std::system_error when a thread cannot start.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return threads_; }

  // Calls fn over [0, n) in chunks; returns when every unit is done. One caller at a time, never from inside fn.
  void run(int n, Chunking chunks, Fn fn, void* ctx);

  // The same with a callable f(begin, end, worker); it lives on the caller's stack, nothing is allocated.
  template <class F>
  void run(int n, Chunking chunks, F&& f) {
    using Callable = std::remove_reference_t<F>;
    run(n, chunks, [](void* ctx, int b, int e, int w) { (*static_cast<Callable*>(ctx))(b, e, w); }, const_cast<void*>(static_cast<const void*>(&f)));
  }

  // The units of [0, n) that `worker` begins with.
  struct Range {
    int begin, end;
  };
  Range range_of(int n, int worker) const {
    const auto at = [&](int w) { return static_cast<int>(static_cast<int64_t>(n) * w / threads_); };
    return {at(worker), at(worker + 1)};
  }

  // Calls f(member) on every thread. All calls go through the same phases with the same counts; what f does outside of them it does
  // once per thread, at any time until `together` returns: a thread that sleeps is not waited for while others do its units.
  template <class F>
  void together(F&& f);

  // Workers sleep now instead of spinning on: called when no launch is waiting.
  void park() { parked_.store(true, std::memory_order_relaxed); }

 private:
  struct Taken {
    Fn fn;
    void* ctx;
    int begin, end;
  };
  // A thread's range of a phase of `together`, and how many units it has done in such phases, ever.
  struct Seat {
    alignas(128) std::atomic<uint64_t> range{0};  // generation (24 bits) | end (20) | begin (20)
    alignas(128) std::atomic<uint64_t> done{0};
  };
  friend class Member;
  // A worker's range of the phase, and the job: written by the caller of `run`, stable while units of the range are not done.
  struct alignas(128) Lane {
    std::atomic<uint64_t> range{0};  // generation (24 bits) | end (20) | begin (20)
    std::atomic<Fn> fn{nullptr};
    std::atomic<void*> ctx{nullptr};
    std::atomic<int> min{1}, max{1};
  };

  void wake();
  void post(int n, Chunking chunks, Fn fn, void* ctx);
  bool take_own(Lane& lane, Taken& out);
  bool steal(int worker, Taken& out);
  int work(int worker);
  void worker_loop(int worker);
  void idle(const Lane& own, uint64_t seen);
  void sleep(const Lane& own, uint64_t seen);
  void wait_done(uint32_t target);

  int threads_;
  std::unique_ptr<Lane[]> lanes_;
  std::unique_ptr<Seat[]> seats_;
  uint64_t seat_generation_ = 0, seat_expected_ = 0;  // of the last phase of `together`
  alignas(128) std::atomic<uint32_t> seat_epoch_{0};  // moves when a thread that waits between phases has to look again
  std::atomic<int> seat_sleepers_{0};
  uint64_t generation_ = 0;
  uint32_t expected_ = 0;  // done_ when every unit so far is done; both wrap
  alignas(128) std::atomic<uint32_t> done_{0};  // units that workers other than the caller have done, ever
  std::atomic<uint32_t> waiting_{0};
  alignas(128) std::atomic<uint32_t> epoch_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<bool> parked_{false}, stop_{false};
  std::vector<std::thread> workers_;
};

// A thread inside `together`.
class Member {
 public:
  int index() const { return index_; }

  // As ThreadPool::run, on every member with the same n and chunks. A member returns when all units are done, whoever did them.
  template <class F>
  void run(int n, Chunking chunks, F&& f) {
    using Callable = std::remove_reference_t<F>;
    run(n, chunks, [](void* ctx, int b, int e, int w) { (*static_cast<Callable*>(ctx))(b, e, w); }, const_cast<void*>(static_cast<const void*>(&f)));
  }
  // The units this member begins with.
  ThreadPool::Range range_of(int n, Chunking chunks) const { return first_range(n, chunks, index_); }

  Ahead ahead;

 private:
  friend class ThreadPool;
  Member(ThreadPool& pool, int index, uint64_t generation, uint64_t expected)
      : pool_(pool), index_(index), generation_(generation), expected_(expected) {}

  void run(int n, Chunking chunks, ThreadPool::Fn fn, void* ctx);
  ThreadPool::Range first_range(int n, Chunking chunks, int of) const;
  bool take_own(int n, Chunking chunks, ThreadPool::Range& out);
  bool steal(int n, Chunking chunks, bool absent, ThreadPool::Range& out);
  void publish(int units);
  bool finished() const;
  void sleep();

  ThreadPool& pool_;
  const int index_;
  uint64_t generation_, expected_;
};

template <class F>
void ThreadPool::together(F&& f) {
  const uint64_t generation = seat_generation_, expected = seat_expected_;
  run(threads_, {1, 1}, [&, generation, expected](int begin, int end, int) {
    for (int i = begin; i < end; ++i) {
      Member member(*this, i, generation, expected);
      f(member);
      if (i != 0) continue;
      seat_generation_ = member.generation_;
      seat_expected_ = member.expected_;
    }
  });
}

}  // namespace calstack
