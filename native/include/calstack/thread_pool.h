// A fork-join pool for the executor. Work is taken in chunks from one atomic word, so a preempted thread holds up nobody but the
// chunk in its hands; a phase ends when all units are done, not when all threads have arrived.
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace calstack {

struct Chunking {
  int min = 1;        // fewest units a thread takes at once
  int max = 1 << 20;  // most units a thread takes at once; between the two a chunk is remaining / (2 * threads)
};

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

  // Workers sleep now instead of spinning on: called when no launch is waiting.
  void park() { parked_.store(true, std::memory_order_relaxed); }

 private:
  struct Taken {
    int begin, end;
  };

  bool take(Taken& out);
  int work(int worker);
  void worker_loop(int worker);
  void idle(uint64_t seen);
  void sleep(uint64_t seen);
  void wait_done(uint32_t target);

  // state: generation (24 bits) | total units (20) | next unit (20)
  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<uint32_t> done_{0};
  std::atomic<uint32_t> waiting_{0};
  alignas(64) std::atomic<uint32_t> epoch_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<bool> parked_{false}, stop_{false};
  // The job of the current generation: written before state_, stable while a chunk of it is held.
  alignas(64) std::atomic<Fn> fn_{nullptr};
  std::atomic<void*> ctx_{nullptr};
  std::atomic<int> min_{1}, max_{1};

  int threads_;
  std::vector<std::thread> workers_;
};

}  // namespace calstack
