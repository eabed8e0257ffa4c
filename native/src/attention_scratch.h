// What one worker needs while it computes attention. Plain floats, so that every instruction set shares the size.
#pragma once
#include <cstddef>
#include <cstdint>

namespace calstack {

constexpr int kMaxHeadDim = 256;
constexpr int kAttentionBatch = 96;  // query vectors that share one pass over the keys: their state stays in the second-level cache
// Row strides are constants, so that rows need no address registers, and odd in cache lines.
constexpr size_t kRowStride = kMaxHeadDim + 16;
constexpr size_t kScoreStride = 256 + 16;
constexpr int kTileFloats = 64 * kMaxHeadDim;
constexpr float kLeastBf16 = 0x1p-50f;  // smaller values are 0 as bf16: no product or sum of products of pairs is then a denormal

struct alignas(64) AttentionScratch {
  float q[kAttentionBatch * kRowStride];      // scaled queries, as left rows (attention_operands.h)
  float o[kAttentionBatch * kRowStride];      // of the split under way
  float total[kAttentionBatch * kRowStride];  // of the splits before
  float s[kAttentionBatch * kScoreStride];    // scores, then p as left rows, of the split under way
  float m[kAttentionBatch];                   // of the split under way
  float l[kAttentionBatch];
  float total_m[kAttentionBatch];
  float total_l[kAttentionBatch];
  float k_scale[256];                         // of the split's keys, 0 where no vector sees one
  float v_scale[256];
  float tile[kTileFloats];                    // one tile of K or V as wide copies, V padded to rows of head_dim rounded up to 16
  int32_t position[kAttentionBatch];
};

}  // namespace calstack
