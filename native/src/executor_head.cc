// lm_head: only for rows that emit or whose logits were asked for, in chunks of kHeadRows.
#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "calstack/executor.h"
#include "executor_scratch.h"
#include "ref/ref_math.h"

namespace calstack {
namespace {

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

bool has_nan(const float* x, int n) {
  int bad = 0;
  for (int i = 0; i < n; ++i) bad |= x[i] != x[i];
  return bad != 0;
}

constexpr int kNoToken = -2;  // the sampler found no token for this row

// Sampled row `at` of a lane: each is one output further than the one before, whose input token belongs to its history.
SampleArgs row_sampling(const Lane& lane, int at, int vocab) {
  SampleArgs s = lane.sampling;
  s.index += static_cast<uint64_t>(at);
  if (s.output != nullptr) s.n_output += at;
  if (s.mask != nullptr) s.mask += static_cast<size_t>(at) * static_cast<size_t>((vocab + 31) / 32);
  return s;
}

}  // namespace

void Executor::lm_head(const Calbin& calbin, const Call& c, LaunchData& launch) {
  Scratch& s = *scratch_;
  const size_t width = static_cast<size_t>(c.x.width);
  const float* x = at(calbin, c.x);
  s.head.clear();
  for (int i = 0; i < launch.lanes; ++i) {
    Lane& lane = launch.lane[static_cast<size_t>(i)];
    const int sampled = lane.cur - lane.emit, last = lane.cur - lane.logit_rows();
    const int first = std::min(sampled, last);
    for (int r = first; r < lane.cur; ++r) {
      float* to = r >= last ? lane.logits.get() + static_cast<size_t>(r - last) * static_cast<size_t>(calbin.vocab) : nullptr;
      std::memcpy(s.head_x.as<float>() + s.head.size() * width, x + static_cast<size_t>(lane.first_row + r) * width, width * sizeof(float));
      s.head.push_back({lane.first_row + r, i, to, std::max(r - sampled, -1)});
      if (s.head.size() == kHeadRows) head_chunk(calbin, c, launch, kHeadRows);
      if (halted_) return;
    }
  }
  if (!s.head.empty()) head_chunk(calbin, c, launch, static_cast<int>(s.head.size()));
}

void Executor::head_chunk(const Calbin& calbin, const Call& c, LaunchData& launch, int count) {
  const size_t stride = static_cast<size_t>(chip_ == 0 ? calbin.vocab : c.weight.n);
  linear(c, scratch_->head_x.as<float>(), static_cast<size_t>(c.x.width), count, scratch_->logits.as<float>(), stride);
  if (link_ != nullptr && (!gather_logits(c, calbin.vocab, count) || chip_ != 0)) return scratch_->head.clear();
  const int64_t before = now_ns();
  copy_logits(c.softcap, calbin.vocab, launch, count);
  launch.d2h_ns += now_ns() - before;
  sample(c, calbin.vocab, launch, count);
  scratch_->head.clear();
}

// Rows that were asked for, after the soft cap as numerics.md has it.
void Executor::copy_logits(float softcap, int vocab, LaunchData& launch, int count) {
  const size_t bytes = static_cast<size_t>(vocab) * sizeof(float);
  bool any = false;
  for (const HeadRow& row : scratch_->head) any = any || row.logits != nullptr;
  if (!any) return;
  pool_.run(count, {1, 4}, [&](int b, int e, int) {
    for (int i = b; i < e; ++i) {
      float* to = scratch_->head[static_cast<size_t>(i)].logits;
      if (to == nullptr) continue;
      float* row = scratch_->logits.as<float>() + static_cast<size_t>(i) * static_cast<size_t>(vocab);
      for (int v = 0; softcap != 0.0f && v < vocab; ++v) row[v] = reference::soft_cap(row[v], softcap);
      std::memcpy(to, row, bytes);
    }
  });
  for (const HeadRow& row : scratch_->head) launch.d2h_bytes += row.logits != nullptr ? bytes : 0;
}

void Executor::sample(const Call& c, int vocab, LaunchData& launch, int count) {
  if (launch.masks) {
    launch.dropped = !launch.masks();
    launch.masks = nullptr;
  }
  halted_ = halted_ || launch.dropped;
  if (halted_) return;
  if (launch.strict) {
    for (int i = count - 1; i >= 0; --i) {
      const float* row = scratch_->logits.as<float>() + static_cast<size_t>(i) * static_cast<size_t>(vocab);
      if (has_nan(row, vocab)) launch.nan_lane = scratch_->head[static_cast<size_t>(i)].lane;
    }
  }
  pool_.run(count, {1, 1}, [&](int b, int e, int w) {
    for (int i = b; i < e; ++i) {
      const HeadRow& row = scratch_->head[static_cast<size_t>(i)];
      if (row.sample < 0) continue;
      Lane& lane = launch.lane[static_cast<size_t>(row.lane)];
      const int at = row.sample;
      SampleOut out{-1, 0.0f, lane.top_ids + at * kMostTop, lane.top_logprobs + at * kMostTop};
      float* logits = scratch_->logits.as<float>() + static_cast<size_t>(i) * static_cast<size_t>(vocab);
      const float softcap = row.logits == nullptr ? c.softcap : 0.0f;  // rows given back have it already
      kernels_.sample(logits, vocab, softcap, row_sampling(lane, at, vocab), out, scratch_->worker[static_cast<size_t>(w)].sample.data());
      lane.token[at] = out.token < 0 || lane.failed ? kNoToken : out.token;
      lane.logprob[at] = out.logprob;
      lane.n_top = lane.sampling.top_logprobs > 0 ? lane.sampling.top_logprobs : 0;
    }
  });
}

}  // namespace calstack
