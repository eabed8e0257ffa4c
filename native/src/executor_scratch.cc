#include "executor_scratch.h"

#include <algorithm>

namespace calstack {
namespace {

constexpr size_t kSmallestGroup = 16;

size_t align64(size_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

void grow(Region& region, size_t bytes) {
  if (region.size() < bytes) region = Region(align64(bytes));
}

QuantRows advance(const QuantRows& q, int rows) {
  const size_t r = static_cast<size_t>(rows), groups = static_cast<size_t>(q.k / q.group);
  return {q.codes + r * static_cast<size_t>(q.k), q.scale + r * groups, q.asum + r * groups, q.isum + r * groups, q.k, q.group};
}

void Scratch::grow_quant(size_t elements) {
  grow(codes_, elements);
  const size_t groups = elements / kSmallestGroup + 1;
  grow(scale_, groups * 4);
  grow(asum_, groups * 4);
  grow(isum_, groups * 4);
}

QuantRows Scratch::shared(int k, int group) const {
  return {codes_.as<int8_t>(), scale_.as<float>(), asum_.as<float>(), isum_.as<int32_t>(), k, group};
}

QuantRows Scratch::few(int worker_index, int k, int group) const {
  QuantRows q = worker[static_cast<size_t>(worker_index)].few;
  q.k = k;
  q.group = group;
  return q;
}

void Scratch::grow_few(size_t elements) {
  few_elements_ = elements = align64(std::max({elements, few_elements_, static_cast<size_t>(kFewElements)}));
  const size_t groups = align64(4 * (elements / kSmallestGroup));
  for (auto& w : worker) {
    grow(w.few_memory, elements + 3 * groups);
    uint8_t* p = w.few_memory.data();
    w.few = {reinterpret_cast<int8_t*>(p), reinterpret_cast<float*>(p + elements), reinterpret_cast<float*>(p + elements + groups),
             reinterpret_cast<int32_t*>(p + elements + 2 * groups), 0, 0};
  }
}

void Scratch::grow_attention(const AttnShape& s, int lanes, int rows, int splits) {
  for (auto& w : worker) grow(w.attention, attention_scratch_bytes(s));
  const size_t most = static_cast<size_t>(lanes * std::max(splits, 1) + rows + lanes);
  for (auto& w : worker) w.items.reserve(std::max(most, w.items.capacity()));
  const size_t parts = static_cast<size_t>(lanes) * static_cast<size_t>(splits) * static_cast<size_t>(s.heads);
  grow(partial_ml, parts * 2 * sizeof(float));
  grow(partial_o, parts * static_cast<size_t>(s.head_dim) * sizeof(float));
}

void Scratch::grow_moe(int rows, int top_k, int experts) {
  (void)top_k;
  grow(router, static_cast<size_t>(rows) * static_cast<size_t>(experts) * sizeof(float));
  expert_next.reserve(std::max(expert_next.capacity(), static_cast<size_t>(experts) + 1));
}

void Scratch::grow_experts(int rows, int top_k, int experts, int inner) {
  const size_t pairs = static_cast<size_t>(rows) * static_cast<size_t>(top_k);
  grow(hidden, pairs * static_cast<size_t>(inner) * sizeof(float));
  active.reserve(std::max(active.capacity(), static_cast<size_t>(experts)));
  expert_next.reserve(std::max(expert_next.capacity(), static_cast<size_t>(experts) + 1));
}

void Scratch::grow_texts(int lanes, int rows) {
  const size_t blocks = static_cast<size_t>(rows / kBlockPositions + lanes);
  for (size_t i = text_blocks.size(); i < blocks; ++i) text_blocks.push_back(static_cast<int32_t>(i));
  text_ends.resize(std::max(text_ends.size(), static_cast<size_t>(rows)));
  text_tables.resize(std::max(text_tables.size(), static_cast<size_t>(lanes)));
}

void Scratch::grow_classifier(int hidden_, int inner, int labels) {
  grow(head_x, kHeadRows * static_cast<size_t>(hidden_) * sizeof(float));
  grow(hidden, kHeadRows * static_cast<size_t>(inner) * sizeof(float));
  grow(logits, kHeadRows * static_cast<size_t>(labels) * sizeof(float));
}

void Scratch::grow_head(int hidden, int vocab, int lanes) {
  (void)lanes;
  head.reserve(kHeadRows);
  grow(head_x, kHeadRows * static_cast<size_t>(hidden) * sizeof(float));
  grow(logits, kHeadRows * static_cast<size_t>(vocab) * sizeof(float));
  for (auto& w : worker) grow(w.sample, static_cast<size_t>(vocab) * 16 + 64);
}

size_t Scratch::bytes() const {
  size_t sum = normed.size() + router.size() + hidden.size() + head_x.size() + logits.size() + partial_ml.size() + partial_o.size();
  sum += codes_.size() + scale_.size() + asum_.size() + isum_.size();
  for (const auto& w : worker) sum += w.few_memory.size() + w.attention.size() + w.sample.size() + w.row.size();
  return sum;
}

}  // namespace calstack
