// Sizes and places inside a packed weight (layout n16.v1, see calstack/kernels.h). Internal linkage: see kernel_parts.h.
#pragma once
#include "calstack/kernels.h"

namespace calstack {

[[maybe_unused]] static inline bool is_grouped(WFmt f) { return f == WFmt::w4a8 || f == WFmt::w8a8 || f == WFmt::w4a16; }

// Bytes of the codes of one group of one block.
[[maybe_unused]] static inline size_t code_bytes(const Weight& w) { return (size_t)w.group * (w.format == WFmt::w8a8 ? 16 : 8); }

// Bytes of one group of one block: codes, scales, minima.
[[maybe_unused]] static inline size_t group_bytes(const Weight& w) { return code_bytes(w) + 2 * kLane * (w.minimum ? 2 : 1); }

// Bytes of one block of 16 outputs.
[[maybe_unused]] static inline size_t block_bytes(const Weight& w) {
  if (is_grouped(w.format)) return (size_t)(w.k / w.group) * group_bytes(w);
  return (size_t)w.k * kLane * (w.format == WFmt::f32 ? 4 : 2);
}

// Where the results of one block (or pair of blocks, when gated) go, and how many of its lanes are outputs.
struct BlockOut {
  int column, lanes;
};

[[maybe_unused]] static inline BlockOut block_out(const Weight& w, Epilogue ep, int nb) {
  const int columns = ep == Epilogue::gated ? w.n / 2 : w.n;
  const int column = kLane * (ep == Epilogue::gated ? nb / 2 : nb);
  const int left = columns - column;
  return {column, left < kLane ? left : kLane};
}

}  // namespace calstack
