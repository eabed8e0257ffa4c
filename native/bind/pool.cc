// `_core.pool_probe`: many phases on a pool, for tests and for the cost of a barrier.
#include <nanobind/nanobind.h>

#include <chrono>
#include <memory>
#include <thread>

#include "calstack/thread_pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace calstack::bind {
namespace {

// Runs `phases` phases of `units` units; every `pause_every`th phase comes after `pause_us` of silence. Returns how many
// units did not run exactly once, and the mean time of a phase in ns, pauses excluded.
nb::tuple probe(int threads, int phases, int units, int low, int high, int pause_every, int pause_us) {
  if (threads < 1 || phases < 1 || units < 1 || threads > 256 || units > 1 << 20) throw nb::value_error("a count is out of range");
  std::unique_ptr<std::atomic<int>[]> runs(new std::atomic<int>[static_cast<size_t>(units)]);
  for (int i = 0; i < units; ++i) runs[static_cast<size_t>(i)].store(0);
  int64_t wrong = 0, spent = 0;
  nb::gil_scoped_release unlocked;
  ThreadPool pool(threads);
  for (int p = 0; p < phases; ++p) {
    if (pause_every > 0 && p % pause_every == 0) {
      pool.park();
      std::this_thread::sleep_for(std::chrono::microseconds(pause_us));
    }
    const auto start = std::chrono::steady_clock::now();
    pool.run(units, {low, high}, [&](int b, int e, int) {
      for (int i = b; i < e; ++i) runs[static_cast<size_t>(i)].fetch_add(1, std::memory_order_relaxed);
    });
    spent += std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start).count();
    for (int i = 0; i < units; ++i) wrong += runs[static_cast<size_t>(i)].load(std::memory_order_relaxed) != p + 1;
  }
  nb::gil_scoped_acquire locked;
  return nb::make_tuple(wrong, static_cast<double>(spent) / phases);
}

// The same in runs of `together` phases each; every phase has one unit more than the one before, so that parts move.
nb::tuple probe_together(int threads, int runs, int phases, int units, int low, int high) {
  const int most = units + phases;
  if (threads < 1 || runs < 1 || phases < 1 || units < 0 || threads > 256 || most > 1 << 20) throw nb::value_error("a count is out of range");
  std::unique_ptr<std::atomic<int>[]> ran(new std::atomic<int>[static_cast<size_t>(most)]);
  for (int i = 0; i < most; ++i) ran[static_cast<size_t>(i)].store(0);
  std::atomic<int64_t> early{0};
  int64_t wrong = 0;
  nb::gil_scoped_release unlocked;
  ThreadPool pool(threads);
  const auto start = std::chrono::steady_clock::now();
  for (int r = 0; r < runs; ++r)
    pool.together([&](Member& member) {
      for (int p = 0; p < phases; ++p) {
        member.run(units + p, {low, high}, [&](int b, int e, int) {
          for (int i = b; i < e; ++i) ran[static_cast<size_t>(i)].fetch_add(1, std::memory_order_relaxed);
        });
        // Behind a phase all its units are done, by whomever.
        bool all = true;
        for (int i = 0; i < units; ++i) all = all && ran[static_cast<size_t>(i)].load(std::memory_order_relaxed) >= r * phases + p + 1;
        if (!all) ++early;
      }
    });
  const auto spent = std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start).count();
  for (int i = 0; i < most; ++i) {
    const int expected = i < units ? runs * phases : runs * (most - 1 - i);
    wrong += ran[static_cast<size_t>(i)].load(std::memory_order_relaxed) != expected ? 1 : 0;
  }
  nb::gil_scoped_acquire locked;
  return nb::make_tuple(wrong + early.load(), static_cast<double>(spent) / (static_cast<double>(runs) * phases));
}

}  // namespace

void init_pool(nb::module_& m) {
  m.def("pool_probe", &probe, "threads"_a, "phases"_a, "units"_a, "low"_a, "high"_a, "pause_every"_a, "pause_us"_a);
  m.def("pool_probe_together", &probe_together, "threads"_a, "runs"_a, "phases"_a, "units"_a, "low"_a, "high"_a);
}

}  // namespace calstack::bind
