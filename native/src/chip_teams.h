// Programs of several chips on one machine: a thread team per chip, each with its own executor.
#pragma once
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "calstack/executor.h"
#include "chip_link.h"

namespace calstack {

class ChipTeams {
 public:
  // `threads` in all; every team has at least one. The caller of `run` is worker 0 of the first team.
  ChipTeams(const KernelTable& kernels, int chips, int threads);
  ~ChipTeams();
  ChipTeams(const ChipTeams&) = delete;
  ChipTeams& operator=(const ChipTeams&) = delete;

  int chips() const { return static_cast<int>(teams_.size()); }
  void prepare(const Calbin& calbin);
  size_t scratch_bytes() const;
  void park();

  // As Executor::run, on every chip of the calbin.
  bool run(const Calbin& calbin, LaunchData& launch, const std::atomic<bool>& abort, bool isolate);

 private:
  struct Team {
    Team(const KernelTable& kernels, int threads) : pool(threads), executor(kernels, pool) {}
    ThreadPool pool;
    Executor executor;
    std::thread leader;
  };
  struct Job {
    LaunchData* launch = nullptr;
    ChipLink* link = nullptr;
    const std::atomic<bool>* abort = nullptr;
  };

  void lead(int chip);
  bool run_chip(int chip, const Job& job);

  std::vector<std::unique_ptr<Team>> teams_;
  std::mutex mutex_;
  std::condition_variable posted_, done_;
  Job job_;
  uint64_t round_ = 0;
  int running_ = 0;
  bool ran_ = true, stop_ = false;
};

}  // namespace calstack
