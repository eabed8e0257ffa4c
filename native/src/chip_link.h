// What the chips of one launch share: where they meet, and what they show each other.
#pragma once
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <vector>

#include "calstack/executor.h"

namespace calstack {

// A chip's part of the logits of a head chunk: [rows, n], vocabulary entries from `first` on.
struct LogitsPart {
  const float* data = nullptr;
  int first = 0, n = 0;
};

class ChipLink {
 public:
  // With `isolate` one chip runs at a time, and while it does the other chips' shards cannot be read.
  ChipLink(std::vector<const Calbin*> chips, bool isolate);
  ~ChipLink();

  int chips() const { return static_cast<int>(chips_.size()); }
  const Calbin& chip(int index) const { return *chips_[static_cast<size_t>(index)]; }
  LogitsPart& logits(int index) { return logits_[static_cast<size_t>(index)]; }

  // Before a chip's first call: with `isolate`, waits for its turn.
  bool begin(int chip, const std::atomic<bool>& abort);
  // Returns when every chip is here; false when one of them has left, or at `abort`.
  bool meet(int chip, const std::atomic<bool>& abort);
  // This chip takes part no more. After an unfinished launch nobody waits for it.
  void leave(int chip, bool finished);

 private:
  bool await(std::unique_lock<std::mutex>& lock, int chip, uint64_t phase, const std::atomic<bool>& abort);
  void pass_turn();
  void take_turn(int chip);

  std::vector<const Calbin*> chips_;
  std::vector<LogitsPart> logits_;
  const bool isolate_;
  std::mutex mutex_;
  std::condition_variable moved_;
  std::atomic<uint64_t> phase_{0};
  std::atomic<bool> broken_{false};
  int arrived_ = 0, turn_ = 0;
  std::vector<char> gone_;
};

}  // namespace calstack
