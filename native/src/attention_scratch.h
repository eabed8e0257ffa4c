// What one worker needs while it computes attention. Plain floats, so that every instruction set shares the size.
#pragma once
#include <cstddef>
#include <cstdint>

namespace calstack {

constexpr int kMaxHeadDim = 256;
constexpr int kAttentionBatch = 96;  // query vectors that share one pass over the keys: their state stays in the second-level cache
constexpr size_t kRowStride = kMaxHeadDim + 16;  // of q and o: constant, so rows need no address registers; odd in cache lines
constexpr int kTileFloats = 64 * kMaxHeadDim;

struct alignas(64) AttentionScratch {
  float q[kAttentionBatch * kRowStride];      // scaled queries
  float o[kAttentionBatch * kRowStride];      // of the split under way
  float total[kAttentionBatch * kRowStride];  // of the splits before
  float s[kAttentionBatch * 64];              // scores, then p, of the tile under way
  float lanes[kAttentionBatch * 16];          // L of the split under way
  float c[kAttentionBatch];
  float m[kAttentionBatch];
  float total_m[kAttentionBatch];
  float total_l[kAttentionBatch];
  float k[kTileFloats];                       // the key tile as floats
  float v[kTileFloats];                       // [64][head_dim rounded up to 16]
  int32_t position[kAttentionBatch];
};

}  // namespace calstack
