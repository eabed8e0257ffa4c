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

struct alignas(64) AttentionScratch {
  float q[kAttentionBatch * kRowStride];      // scaled queries
  float o[kAttentionBatch * kRowStride];      // of the split under way
  float total[kAttentionBatch * kRowStride];  // of the splits before
  float s[kAttentionBatch * kScoreStride];    // scores, then p, of the split under way
  float m[kAttentionBatch];                   // of the split under way
  float l[kAttentionBatch];
  float total_m[kAttentionBatch];
  float total_l[kAttentionBatch];
  float tile[kTileFloats];                    // one tile of K or V as floats, V padded to [64][head_dim rounded up to 16]
  int32_t position[kAttentionBatch];
};

}  // namespace calstack
