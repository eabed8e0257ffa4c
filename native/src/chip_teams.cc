#include "chip_teams.h"

#include <algorithm>

namespace calstack {

ChipTeams::ChipTeams(const KernelTable& kernels, int chips, int threads) {
  for (int chip = 0; chip < chips; ++chip) teams_.push_back(std::make_unique<Team>(kernels, std::max(threads / chips, 1)));
  for (int chip = 1; chip < chips; ++chip) teams_[static_cast<size_t>(chip)]->leader = std::thread([this, chip] { lead(chip); });
}

ChipTeams::~ChipTeams() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  posted_.notify_all();
  for (auto& team : teams_)
    if (team->leader.joinable()) team->leader.join();
}

void ChipTeams::prepare(const Calbin& calbin) {
  for (int chip = 0; chip < calbin.chips(); ++chip) teams_[static_cast<size_t>(chip)]->executor.prepare(calbin.chip(chip));
}

size_t ChipTeams::scratch_bytes() const {
  size_t sum = 0;
  for (const auto& team : teams_) sum += team->executor.scratch_bytes();
  return sum;
}

void ChipTeams::park() {
  for (auto& team : teams_) team->pool.park();
}

bool ChipTeams::run(const Calbin& calbin, LaunchData& launch, const std::atomic<bool>& abort, bool isolate) {
  std::vector<const Calbin*> parts;
  for (int chip = 0; chip < calbin.chips(); ++chip) parts.push_back(&calbin.chip(chip));
  ChipLink link(std::move(parts), isolate);
  const Job job{&launch, &link, &abort};
  {
    std::lock_guard lock(mutex_);
    job_ = job;
    running_ = link.chips() - 1;
    ran_ = true;
    ++round_;
  }
  posted_.notify_all();
  const bool ran = run_chip(0, job);
  std::unique_lock lock(mutex_);
  done_.wait(lock, [this] { return running_ == 0; });
  return ran && ran_;
}

void ChipTeams::lead(int chip) {
  uint64_t seen = 0;
  std::unique_lock lock(mutex_);
  for (;;) {
    posted_.wait(lock, [&] { return stop_ || round_ != seen; });
    if (stop_) return;
    seen = round_;
    const Job job = job_;
    if (chip >= job.link->chips()) continue;
    lock.unlock();
    const bool ran = run_chip(chip, job);
    lock.lock();
    ran_ = ran_ && ran;
    if (--running_ == 0) done_.notify_all();
  }
}

bool ChipTeams::run_chip(int chip, const Job& job) {
  const bool ran = job.link->begin(chip, *job.abort) &&
                   teams_[static_cast<size_t>(chip)]->executor.run(job.link->chip(chip), *job.launch, *job.abort, job.link, chip);
  job.link->leave(chip, ran);
  return ran;
}

}  // namespace calstack
