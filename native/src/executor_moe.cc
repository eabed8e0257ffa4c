// Mixture of experts: every (row, choice) pair is a row of its expert's product, and pairs lie sorted by expert.
#include <algorithm>
#include <cstring>

#include "calstack/executor.h"
#include "chip_link.h"
#include "executor_scratch.h"
#include "packed.h"

namespace calstack {
namespace {

// A row of the `choice` buffer: weights, experts and places of the pairs, top_k each; f32 holds the integers exactly.
struct Choice {
  float* row;
  int top_k;
  Choice(float* base, const Buf& b, int r, int k) : row(base + static_cast<size_t>(r) * static_cast<size_t>(b.width)), top_k(k) {}
  float* weights() const { return row; }
  int expert(int j) const { return static_cast<int>(row[top_k + j]); }
  int place(int j) const { return static_cast<int>(row[2 * top_k + j]); }
  void set(int j, int expert) const { row[top_k + j] = static_cast<float>(expert); }
  void put(int j, int place) const { row[2 * top_k + j] = static_cast<float>(place); }
};

int owner(const std::vector<int>& starts, int expert) {
  int chip = static_cast<int>(starts.size()) - 1;
  while (chip > 0 && expert < starts[static_cast<size_t>(chip)]) --chip;
  return chip;
}

// One expert's part of a stacked weight.
Weight expert_weight(const Weight& w, int experts, int e) {
  Weight one = w;
  one.n = w.n / experts;
  one.data = w.data + static_cast<size_t>(e) * static_cast<size_t>(one.n / kLane) * block_bytes(w);
  return one;
}

bool quantised(const Weight& w) { return w.format == WFmt::w4a8 || w.format == WFmt::w8a8; }

constexpr Chunking kExpertChunks{2};
constexpr size_t kFirstBytes = 8192;  // of a thread's first weights, fetched while it prepares its rows

template <class T>
void copy_part(T* base, size_t n, int from, int to) {
  std::memcpy(base + static_cast<size_t>(to) * n, base + static_cast<size_t>(from) * n, n * sizeof(T));
}

// The products of a call with the experts that have work: units are blocks of 16 outputs (or gate and up pairs), expert by expert.
class ExpertUnits {
 public:
  ExpertUnits(const Weight& w, int experts, Epilogue ep, const std::vector<ActiveExpert>& active)
      : w_(w), experts_(experts), step_(ep == Epilogue::gated ? 2 : 1), each_(w.n / experts / kLane / step_), active_(active) {}
  int count() const { return each_ * static_cast<int>(active_.size()); }

  // Where the weights of a unit lie; behind the last one: null.
  const uint8_t* at(int unit) const {
    if (unit >= count()) return nullptr;
    const Weight one = expert_weight(w_, experts_, active_[static_cast<size_t>(unit / each_)].expert);
    return one.data + static_cast<size_t>(unit % each_ * step_) * block_bytes(w_);
  }

  // f(expert, its weight, first block, end block, end unit) for each expert that units [begin, end) touch.
  template <class F>
  void visit(int begin, int end, F&& f) const {
    while (begin < end) {
      const int i = begin / each_, stop = std::min(end, (i + 1) * each_);
      const ActiveExpert& a = active_[static_cast<size_t>(i)];
      f(a, expert_weight(w_, experts_, a.expert), (begin - i * each_) * step_, (stop - i * each_) * step_, stop);
      begin = stop;
    }
  }

 private:
  const Weight& w_;
  int experts_, step_, each_;
  const std::vector<ActiveExpert>& active_;
};

}  // namespace

// A row for every pair, as the products with a weight read it.
struct PairRows {
  QuantRows q{};
  float* plain = nullptr;  // null: quantised
  size_t k = 0;

  void set(const KernelTable& kernels, const float* x, const NormSpec& norm, int to) const {
    if (plain == nullptr) return kernels.quant_rows(x, k, norm, advance(q, to), 0, 1);
    kernels.norm_rows(x, k, norm, plain + static_cast<size_t>(to) * k, k, static_cast<int>(k), 0, 1);
  }
  void copy(int from, int to) const {
    if (plain != nullptr) return copy_part(plain, k, from, to);
    const size_t groups = k / static_cast<size_t>(q.group);
    copy_part(q.codes, k, from, to);
    copy_part(q.scale, groups, from, to);
    copy_part(q.asum, groups, from, to);
    copy_part(q.isum, groups, from, to);
  }
};

void Executor::moe_route(const Calbin& calbin, const Call& c, LaunchData& launch) {
  float* z = scratch_->router.as<float>();
  const int experts = c.weight.n;
  linear(c, at(calbin, c.x), static_cast<size_t>(c.x.width), launch.rows, z, static_cast<size_t>(experts));
  float* choice = at(calbin, c.out);
  pool_.run(launch.rows, {8}, [&](int b, int e, int) {
    int32_t chosen[kMostChosen];
    for (int r = b; r < e; ++r) {
      const Choice row(choice, c.out, r, c.top_k);
      kernels_.moe_route(z + static_cast<size_t>(r) * static_cast<size_t>(experts), experts, c.top_k, c.renormalise, row.weights(), chosen);
      for (int j = 0; j < c.top_k; ++j) row.set(j, chosen[j]);
    }
  });
  place_pairs(c, launch.rows, choice);
}

// Every chip finds the same places: pairs of one expert side by side, in the order of rows; each chip counts its own from 0.
void Executor::place_pairs(const Call& c, int rows, float* choice) {
  auto& next = scratch_->expert_next;
  next.assign(static_cast<size_t>(c.weight.n) + 1, 0);
  const auto each = [&](auto&& f) {
    for (int r = 0; r < rows; ++r)
      for (int j = 0; j < c.top_k; ++j) f(Choice(choice, c.out, r, c.top_k), j);
  };
  each([&](const Choice& row, int j) { ++next[static_cast<size_t>(row.expert(j)) + 1]; });
  for (size_t e = 0; e < static_cast<size_t>(c.weight.n); ++e) {
    const bool first = std::find(c.starts.begin(), c.starts.end(), static_cast<int>(e)) != c.starts.end();
    next[e] = first ? 0 : next[e];
    next[e + 1] += next[e];
  }
  each([&](const Choice& row, int j) { row.put(j, next[static_cast<size_t>(row.expert(j))]++); });
}

// The chip's pairs and the experts that have any.
void Executor::list_pairs(const Call& c, int rows, float* choice) {
  auto& s = *scratch_;
  std::vector<int>& count = s.expert_next;
  count.assign(static_cast<size_t>(c.experts), 0);
  s.pair_count = 0;
  for (int r = 0; r < rows; ++r)
    for (int j = 0; j < c.top_k; ++j) {
      const Choice row(choice, c.table, r, c.top_k);
      const int e = row.expert(j) - c.first;
      if (e < 0 || e >= c.experts) continue;
      ++count[static_cast<size_t>(e)];
      ++s.pair_count;
    }
  s.active.clear();
  int at = 0;
  for (int e = 0; e < c.experts; ++e) {
    if (count[static_cast<size_t>(e)] != 0) s.active.push_back({e, at, count[static_cast<size_t>(e)]});
    at += count[static_cast<size_t>(e)];
  }
}

void Executor::moe_experts(const Calbin& calbin, const Call& c, LaunchData& launch) {
  const float *choice = at(calbin, c.table), *x = at(calbin, c.x);
  list_pairs(c, launch.rows, at(calbin, c.table));
  const int pairs = scratch_->pair_count;
  launch.experts = static_cast<int>(scratch_->active.size());
  if (pairs == 0) return;
  float *h = scratch_->hidden.as<float>(), *out = at(calbin, c.out);
  const size_t inner = static_cast<size_t>(c.down.k);
  const ExpertUnits up(c.weight, c.experts, Epilogue::gated, scratch_->active), down(c.down, c.experts, Epilogue::store, scratch_->active);
  pool_.together([&](Member& team) {
    const auto spread = [&](const PairRows& to, int b, int e) {
      for (int r = b; r < e; ++r) spread_row(c, choice, x, r, to);
    };
    const auto quantise = [&](const PairRows& to, int b, int e) {
      for (int i = b; i < e; ++i) to.set(kernels_, h + static_cast<size_t>(i) * inner, {nullptr, 0.0f}, i);
    };
    const uint8_t* first = down.at(team.range_of(down.count(), kExpertChunks).begin);
    expert_products(team, c.weight, up, first, launch.rows, spread, {Epilogue::gated, c.act, h, inner});
    expert_products(team, c.down, down, nullptr, pairs, quantise, {Epilogue::store, c.act, out, static_cast<size_t>(c.weight.k)});
  });
}

// Row r of x for every pair of it that is this chip's: made once, then copied.
void Executor::spread_row(const Call& c, const float* choice, const float* x, int r, const PairRows& to) {
  const Choice row(const_cast<float*>(choice), c.table, r, c.top_k);
  int made = -1;
  for (int j = 0; j < c.top_k; ++j) {
    if (row.expert(j) < c.first || row.expert(j) >= c.first + c.experts) continue;
    if (made >= 0) {
      to.copy(made, row.place(j));
      continue;
    }
    made = row.place(j);
    to.set(kernels_, x + static_cast<size_t>(r) * static_cast<size_t>(c.x.width), c.norm, made);
  }
}

// One row of products for every pair. `rows` are prepared by `prepare(where, begin, end)`: by all threads together, or few of them by
// each for itself. `next`: what the thread reads behind its part.
template <class Units, class Prepare>
void Executor::expert_products(Member& team, const Weight& w, const Units& units, const uint8_t* next, int rows, Prepare&& prepare, const ExpertOut& to) {
  const bool few = quantised(w) && scratch_->pair_count * w.k <= kFewPairs;
  PairRows in{{}, quantised(w) ? nullptr : scratch_->normed.as<float>(), static_cast<size_t>(w.k)};
  if (quantised(w)) in.q = scratch_->shared(w.k, w.group);
  if (few) in.q = scratch_->few(team.index(), w.k, w.group);
  const ThreadPool::Range own = team.range_of(units.count(), kExpertChunks);
  team.ahead.clear();
  team.ahead.add(units.at(own.begin), kFirstBytes);
  if (!few) team.run(rows, {1, 32}, [&](int b, int e, int) { prepare(in, b, e); });
  team.ahead.finish();
  bool ready = !few;
  team.run(units.count(), kExpertChunks, [&](int b, int e, int) {
    if (!ready) prepare(in, 0, rows);
    ready = true;
    const bool stolen = b < own.begin || b >= own.end;
    units.visit(b, e, [&](const ActiveExpert& a, Weight one, int nb0, int nb1, int end) {
      one.after = stolen ? nullptr : end == own.end ? next : units.at(end);
      float* y = to.data + static_cast<size_t>(a.first) * to.stride;
      if (quantised(w)) kernels_.linear_q(one, advance(in.q, a.first), a.count, nullptr, to.epilogue, to.act, y, to.stride, nb0, nb1);
      else kernels_.linear_f(one, in.plain + static_cast<size_t>(a.first) * in.k, in.k, a.count, nullptr, to.epilogue, to.act, y, to.stride, nb0, nb1);
    });
  });
}

// Over several chips every chip reads the outputs where their experts are.
void Executor::moe_combine(const Calbin& calbin, const Call& c, LaunchData& launch) {
  if (link_ != nullptr && !meet()) return;
  float* x = at(calbin, c.out);
  const size_t n = static_cast<size_t>(c.out.width);
  float* choice = at(calbin, c.table);
  pool_.run(launch.rows, {4}, [&](int b, int e, int) {
    const float* parts[kMostChosen];
    for (int r = b; r < e; ++r) {
      const Choice row(choice, c.table, r, c.top_k);
      for (int j = 0; j < c.top_k; ++j) {
        const size_t chip = static_cast<size_t>(owner(c.starts, row.expert(j)));
        const Calbin& there = link_ != nullptr ? link_->chip(static_cast<int>(chip)) : calbin;
        parts[j] = at(there, c.parts[chip]) + static_cast<size_t>(row.place(j)) * n;
      }
      kernels_.moe_combine(row.weights(), parts, c.top_k, x + static_cast<size_t>(r) * n, c.out.width);
    }
  });
  if (link_ != nullptr) meet();
}

}  // namespace calstack
