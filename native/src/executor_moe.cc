// Mixture of experts: every (row, choice) pair is a row of its expert's product, and pairs lie sorted by expert.
#include <algorithm>

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

}  // namespace

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
      s.pair_row[static_cast<size_t>(row.place(j))] = r;
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
  list_pairs(c, launch.rows, at(calbin, c.table));
  if (scratch_->pair_count == 0) return;
  float* h = scratch_->hidden.as<float>();
  const size_t inner = static_cast<size_t>(c.down.k), hidden = static_cast<size_t>(c.down.n / c.experts);
  const PairRows in{at(calbin, c.x), static_cast<size_t>(c.x.width), scratch_->pair_row.data(), c.norm};
  expert_products(c.weight, c.experts, in, Epilogue::gated, c.act, h, inner);
  expert_products(c.down, c.experts, {h, inner, nullptr, {nullptr, 0.0f}}, Epilogue::store, c.act, at(calbin, c.out), hidden);
}

// One row of products for every pair: row i of `in` with the weights of its expert.
void Executor::expert_products(const Weight& w, int experts, const PairRows& in, Epilogue ep, Act act, float* out, size_t os) {
  const int pairs = scratch_->pair_count, step = ep == Epilogue::gated ? 2 : 1;
  const int units = w.n / experts / kLane / step;
  const bool few = quantised(w) && pairs * w.k <= kFewPairs;
  const QuantRows shared = quantised(w) ? scratch_->shared(w.k, w.group) : QuantRows{};
  float* plain = scratch_->normed.as<float>();
  const auto prepare = [&](const QuantRows& q, int b, int e) {
    for (int i = b; i < e; ++i) {
      const float* row = in.x + static_cast<size_t>(in.row != nullptr ? in.row[i] : i) * in.stride;
      if (quantised(w)) kernels_.quant_rows(row, in.stride, in.norm, advance(q, i), 0, 1);
      else kernels_.norm_rows(row, in.stride, in.norm, plain + static_cast<size_t>(i) * static_cast<size_t>(w.k), static_cast<size_t>(w.k), w.k, 0, 1);
    }
  };
  if (!few) pool_.run(pairs, {2, 32}, [&](int b, int e, int) { prepare(shared, b, e); });
  const uint64_t phase = ++scratch_->phase;
  pool_.run(static_cast<int>(scratch_->active.size()) * units, {2}, [&](int b, int e, int worker) {
    QuantRows q = shared;
    if (few) {
      WorkerScratch& mine = scratch_->worker[static_cast<size_t>(worker)];
      q = mine.few;
      q.k = w.k;
      q.group = w.group;
      if (mine.phase != phase) prepare(q, 0, pairs);
      mine.phase = phase;
    }
    while (b < e) {  // expert by expert
      const ActiveExpert& a = scratch_->active[static_cast<size_t>(b / units)];
      const int from = b % units, to = std::min(units, from + e - b);
      const Weight one = expert_weight(w, experts, a.expert);
      float* y = out + static_cast<size_t>(a.first) * os;
      if (quantised(w)) kernels_.linear_q(one, advance(q, a.first), a.count, nullptr, ep, act, y, os, from * step, to * step);
      else kernels_.linear_f(one, plain + static_cast<size_t>(a.first) * static_cast<size_t>(w.k), static_cast<size_t>(w.k), a.count, nullptr, ep, act, y, os, from * step, to * step);
      b += to - from;
    }
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
