// A fork-join pool for the executor. Every thread has its own range of a phase's units, always the same for the same count, and takes
// chunks of it; one that has none left takes from the end of another's. So a preempted thread holds up nobody but the chunk in its
// hands, and threads share no cache line while they have work of their own. A phase ends when all units are done.
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

class ThreadPool {
 public:
  using Fn = void (*)(void* ctx, int begin, int end, int worker);
  using Tail = void (*)(void* ctx, int worker);

  // `threads` counts the caller of `run`, which is worker 0; throws std::system_error when a thread cannot start.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return threads_; }

  // Calls fn over [0, n) in chunks; returns when every unit is done. One caller at a time, never from inside fn.
  void run(int n, Chunking chunks, Fn fn, void* ctx, Tail tail = nullptr);

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

  // The same; a worker calls tail(worker) when it finds no more units, before it reports its own as done.
  template <class F, class T>
  void run_then(int n, Chunking chunks, F&& f, T&& tail) {
    struct Both {
      std::remove_reference_t<F>* f;
      std::remove_reference_t<T>* tail;
    } both{&f, &tail};
    const auto call = [](void* ctx, int b, int e, int w) { (*static_cast<Both*>(ctx)->f)(b, e, w); };
    run(n, chunks, call, &both, [](void* ctx, int w) { (*static_cast<Both*>(ctx)->tail)(w); });
  }

  // Workers sleep now instead of spinning on: called when no launch is waiting.
  void park() { parked_.store(true, std::memory_order_relaxed); }

 private:
  struct Taken {
    Fn fn;
    void* ctx;
    int begin, end;
    Tail tail;
  };
  // A worker's range of the phase, and the job: written by the caller of `run`, stable while units of the range are not done.
  struct alignas(128) Lane {
    std::atomic<uint64_t> range{0};  // generation (24 bits) | end (20) | begin (20)
    std::atomic<Fn> fn{nullptr};
    std::atomic<void*> ctx{nullptr};
    std::atomic<Tail> tail{nullptr};
    std::atomic<int> min{1}, max{1};
  };

  void wake();
  void post(int n, Chunking chunks, Fn fn, void* ctx, Tail tail);
  bool take_own(Lane& lane, Taken& out);
  bool steal(int worker, Taken& out);
  int work(int worker);
  void worker_loop(int worker);
  void idle(const Lane& own, uint64_t seen);
  void sleep(const Lane& own, uint64_t seen);
  void wait_done(uint32_t target);

  int threads_;
  std::unique_ptr<Lane[]> lanes_;
  uint64_t generation_ = 0;
  uint32_t expected_ = 0;  // done_ when every unit so far is done; both wrap
  alignas(128) std::atomic<uint32_t> done_{0};  // units that workers other than the caller have done, ever
  std::atomic<uint32_t> waiting_{0};
  alignas(128) std::atomic<uint32_t> epoch_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<bool> parked_{false}, stop_{false};
  std::vector<std::thread> workers_;
};

}  // namespace calstack
