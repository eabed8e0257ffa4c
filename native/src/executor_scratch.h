// Working memory of the executor, sized at load for the largest call of any program.
#pragma once
#include <vector>

#include "calstack/executor.h"

namespace calstack {

// Row and element counts below which every worker quantises all rows for itself: cheaper than a barrier.
constexpr int kFewElements = 4096;

// Rows of a launch whose threads look ahead: with more, calls are long and what they read does not stay.
constexpr int kFewRows = 4;

// The same for pairs of rows and experts, where quantising is a small part of the work.
constexpr int kFewPairs = 16384;

struct AttentionItem {
  int lane, r0, r1, split;
};

struct HeadRow {
  int row, lane;
  float* logits;  // where they go on the host, or null
  int sample;     // which of the lane's sampled rows it is, or -1
};

// An expert with work: pairs [first, first + count).
struct ActiveExpert {
  int expert, first, count;
};

struct WorkerScratch {
  QuantRows few{};       // kFewElements or one row
  Region few_memory, attention, sample, row;
  std::vector<AttentionItem> items;
};

class Scratch {
 public:
  explicit Scratch(int workers) : worker(static_cast<size_t>(workers)) {}

  void grow_quant(size_t elements);
  void grow_few(size_t elements);
  void grow_attention(const AttnShape& s, int lanes, int rows, int splits);
  void grow_moe(int rows, int top_k, int experts);
  void grow_experts(int rows, int top_k, int experts, int inner);
  void grow_texts(int lanes, int rows);
  void grow_classifier(int hidden, int inner, int labels);
  void grow_head(int hidden, int vocab, int lanes);
  size_t bytes() const;
  QuantRows shared(int k, int group) const;
  QuantRows few(int worker, int k, int group) const;

  std::vector<WorkerScratch> worker;
  Region normed, head_x, logits, router, hidden;
  std::vector<int> expert_next;
  std::vector<ActiveExpert> active;
  int pair_count = 0;
  std::vector<HeadRow> head;
  Region partial_ml, partial_o;
  // Encoders: per lane its blocks in the launch's own keys and values, per row the last position of its text.
  std::vector<int32_t> text_blocks, text_ends;
  std::vector<const int32_t*> text_tables;

 private:
  Region codes_, scale_, asum_, isum_;
  size_t few_elements_ = 0;
};

void grow(Region& region, size_t bytes);
QuantRows advance(const QuantRows& q, int rows);

}  // namespace calstack
