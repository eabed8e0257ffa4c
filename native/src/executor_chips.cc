// What chips do together: gathers between calls, and the head whose vocabulary they share.
#include <cstring>

#include "calstack/executor.h"
#include "chip_link.h"
#include "executor_scratch.h"

namespace calstack {

// False when the launch ends here.
bool Executor::meet() {
  halted_ = halted_ || !link_->meet(chip_, *abort_);
  return !halted_;
}

// Everyone reads the parts between two meetings: before the first they are not there, behind the second they may change.
void Executor::all_gather(const Calbin& calbin, const Call& c, LaunchData& launch) {
  if (!meet()) return;
  const size_t os = static_cast<size_t>(c.out.width);
  float* out = at(calbin, c.out);
  pool_.run(launch.rows, {8}, [&](int b, int e, int) {
    float* to = out;
    for (int chip = 0; chip < link_->chips(); ++chip) {
      const Buf& part = c.parts[static_cast<size_t>(chip)];
      const size_t n = static_cast<size_t>(part.width);
      const float* from = n == 0 ? nullptr : at(link_->chip(chip), part);
      for (size_t r = static_cast<size_t>(b); r < static_cast<size_t>(e) && n != 0; ++r) {
        if (!c.add) {
          std::memcpy(to + r * os, from + r * n, n * sizeof(float));
          continue;
        }
        for (size_t i = 0; i < n; ++i) to[r * os + i] += from[r * n + i];
      }
      to += n;
    }
  });
  meet();
}

// Chip 0 puts the other chips' columns beside its own.
bool Executor::gather_logits(const Call& c, int vocab, int count) {
  const float* own = scratch_->logits.as<float>();
  link_->logits(chip_) = {own, c.first, c.weight.n};
  if (!meet()) return false;
  for (int chip = 1; chip_ == 0 && chip < link_->chips(); ++chip) {
    const LogitsPart part = link_->logits(chip);
    const size_t n = static_cast<size_t>(part.n), os = static_cast<size_t>(vocab);
    float* to = scratch_->logits.as<float>() + part.first;
    pool_.run(count, {1}, [&](int b, int e, int) {
      for (size_t r = static_cast<size_t>(b); r < static_cast<size_t>(e); ++r) std::memcpy(to + r * os, part.data + r * n, n * sizeof(float));
    });
  }
  return meet();
}

}  // namespace calstack
