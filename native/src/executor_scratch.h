// Working memory of the executor, sized at load for the largest call of any program.
#pragma once
#include <vector>

#include "calstack/executor.h"

namespace calstack {

// Row and element counts below which every worker quantises all rows for itself: cheaper than a barrier.
constexpr int kFewElements = 4096;

struct AttentionItem {
  int lane, r0, r1, split;
};

struct HeadRow {
  int row, lane;
  float* logits;  // where they go on the host, or null
  bool sample;
};

struct WorkerScratch {
  QuantRows few{};       // kFewElements or one row
  Region few_memory, attention, sample;
  uint64_t phase = 0;    // the phase `few` was filled for
};

class Scratch {
 public:
  explicit Scratch(int workers) : worker(static_cast<size_t>(workers)) {}

  void grow_quant(size_t elements);
  void grow_few(size_t elements);
  void grow_attention(const AttnShape& s, int lanes, int rows, int splits);
  void grow_head(int hidden, int vocab, int lanes);
  size_t bytes() const;
  QuantRows shared(int k, int group) const;

  std::vector<WorkerScratch> worker;
  Region normed, head_x, logits;
  std::vector<HeadRow> head;
  std::vector<AttentionItem> items;
  Region partial_ml, partial_o;
  uint64_t phase = 0;

 private:
  Region codes_, scale_, asum_, isum_;
};

void grow(Region& region, size_t bytes);
QuantRows advance(const QuantRows& q, int rows);

}  // namespace calstack
