// The query vectors that attention takes together, and where the cache lies for them.
#pragma once
#include "attention_tile.h"
#include "kv_layout.h"

namespace calstack {
namespace CALSTACK_ISA {
namespace {

constexpr float kMinusInf = -__builtin_inff();
constexpr int kSplitTiles = kSplitKeys / kKeyTile;

CALSTACK_INLINE int smaller(int a, int b) { return a < b ? a : b; }
CALSTACK_INLINE int larger(int a, int b) { return a > b ? a : b; }
CALSTACK_INLINE int clamp(int x, int top) { return x < 0 ? 0 : smaller(x, top); }

struct Range {
  int lo, hi;
  bool empty() const { return lo >= hi; }
};

// Query vectors of one KV head, in ascending position; or of `heads` KV heads in turn, as many for each and all of one position.
struct Batch {
  const AttnShape& s;
  const KVView& kv;
  const int32_t* table;
  size_t kv_head;
  AttentionScratch& x;
  int heads, first, n;  // vectors first to first + n - 1 of the scratch

  Batch head(int j) const { return {s, kv, table, kv_head + static_cast<size_t>(j), x, 1, first + j * (n / heads), n / heads}; }

  size_t dim() const { return static_cast<size_t>(s.head_dim); }
  int dim_vectors() const { return (s.head_dim + 15) / 16; }
  int position(int i) const { return x.position[first + i]; }
  int first_seen(int position) const { return s.window > 0 ? larger(0, position - s.window + 1) : 0; }
  // Keys of [key0, key0 + width) that vector i sees, counted from key0.
  Range seen(int i, int key0, int width) const {
    return {clamp(first_seen(position(i)) - key0, width), clamp(position(i) + 1 - key0, width)};
  }
  // Keys that some vector of [i, i + rows) sees.
  Range seen_by_any(int i, int rows, int key0, int width) const { return {seen(i, key0, width).lo, seen(i + rows - 1, key0, width).hi}; }
  // Tiles of the split that some vector sees.
  Range tiles(int split) const {
    return {larger(split * kSplitTiles, first_seen(position(0)) / kKeyTile), smaller((split + 1) * kSplitTiles, position(n - 1) / kKeyTile + 1)};
  }
  // A handful of vectors take the cache as stored: copying it first would cost more than it saves.
  bool few() const { return n <= 2 * kRows * heads; }

  float* q(int i) const { return x.q + static_cast<size_t>(first + i) * kRowStride; }
  float* o(int i) const { return x.o + static_cast<size_t>(first + i) * kRowStride; }
  float* total(int i) const { return x.total + static_cast<size_t>(first + i) * kRowStride; }
  float* scores(int i) const { return x.s + static_cast<size_t>(first + i) * kScoreStride; }

  const uint8_t* layer(int tile) const { return kv.base + static_cast<size_t>(table[tile]) * kv.block_bytes + kv.layer_offset; }
  KVPlaces places() const { return KVPlaces(kv.type, kv.kv_heads, kv.head_dim); }
  const uint8_t* keys(int tile) const { return layer(tile) + places().k(kv_head); }
  const uint8_t* values(int tile) const { return layer(tile) + places().v(kv_head); }
  size_t k_plane_bytes() const { return places().plane * places().kb; }
  size_t v_plane_bytes() const { return places().plane * places().vb; }
};

// --- what is read next -----------------------------------------------------------------------------------------------------

// The planes of a split in the order they are read, one per tile and head: keys, values, then keys of the tiles behind (or the last again:
// a touch costs nothing when the lines are there).
CALSTACK_INLINE const uint8_t* plane_in_order(const Batch& b, Range tiles, int i) {
  const int n = (tiles.hi - tiles.lo) * b.heads;
  const Batch head = b.head(i % b.heads);
  if (i >= n && i < 2 * n) return head.values(tiles.lo + (i - n) / b.heads);
  const int tile = i < n ? tiles.lo + i / b.heads : tiles.hi + (i - 2 * n) / b.heads;
  return head.keys(smaller(tile, b.position(b.n - 1) / kKeyTile));
}

// While one plane is computed, the next is touched. Two or more ahead, or more of them into the second level only, gained nothing from memory
// (40 to 44 GB/s of 52 that a linear read had, whatever the distance) and cost a fifth of the time from the second level.
CALSTACK_INLINE Touch touch_ahead(const Batch& b, Range tiles, int i, size_t bytes, size_t steps) {
  return {plane_in_order(b, tiles, i + 1), bytes / steps};
}

CALSTACK_INLINE void touch_first(const Batch& b, Range tiles) { Touch{plane_in_order(b, tiles, 0), b.k_plane_bytes()}.touch(); }

// --- wide copies -----------------------------------------------------------------------------------------------------------

CALSTACK_INLINE void put_lanes(F32x16 x, uint8_t* to) { x.store(reinterpret_cast<float*>(to)); }
CALSTACK_INLINE void put_lanes(I32x16 x, uint8_t* to) { x.store(to); }

// Sixteen lanes of a pair of rows, in the form that Wide has.
template <class From, class To, int step>
CALSTACK_INLINE void widen_lanes(const uint8_t* from, size_t from_lanes, int n, uint8_t* to, size_t to_lanes, int to_n) {
  const auto value = From::template right<step>(from, from_lanes, n);
  uint8_t* at = to + (To::kRowsApart ? static_cast<size_t>(step) * to_lanes * sizeof(float) : 0) +
                static_cast<size_t>(to_n) * 16 * (To::kRowsApart ? sizeof(float) : To::kLaneBytes);
  put_lanes(value, at);
}

template <class From, class To>
CALSTACK_INLINE void widen_vector(const uint8_t* from, size_t from_lanes, int n, uint8_t* to, size_t to_lanes, int to_n) {
  widen_lanes<From, To, 0>(from, from_lanes, n, to, to_lanes, to_n);
  if constexpr (From::kSteps == 2) widen_lanes<From, To, 1>(from, from_lanes, n, to, to_lanes, to_n);
}

// The last, partial vector of a pair of rows, which must not be read beyond its end.
template <class From, class To>
void widen_rest(const uint8_t* from, size_t lanes, uint8_t* to, size_t to_lanes) {
  alignas(64) uint8_t copy[128] = {};
  const size_t whole = lanes / 16 * 16, size = From::kRowsApart ? sizeof(float) : From::kLaneBytes;
  std::memcpy(copy, from + whole * size, (lanes - whole) * size);
  if (From::kRowsApart) std::memcpy(copy + 64, from + (lanes + whole) * size, (lanes - whole) * size);
  widen_vector<From, To>(copy, 16, 0, to, to_lanes, static_cast<int>(whole / 16));
}

// Pairs [lo, hi) of a plane with rows of `lanes`.
template <class From, class To>
void widen(const uint8_t* from, size_t lanes, int lo, int hi, uint8_t* to, size_t to_lanes) {
  for (int i = lo; i < hi; ++i) {
    const uint8_t* pair = from + static_cast<size_t>(i) * lanes * From::kLaneBytes;
    uint8_t* out = to + static_cast<size_t>(i) * to_lanes * To::kLaneBytes;
    for (size_t n = 0; n < lanes / 16; ++n) widen_vector<From, To>(pair, lanes, static_cast<int>(n), out, to_lanes, static_cast<int>(n));
    if (lanes % 16 != 0) widen_rest<From, To>(pair, lanes, out, to_lanes);
  }
}

// A key's row of a wide copy of V becomes zero. `swapped`: step 0 of a pair is its odd row.
template <class To>
void clear_row(uint8_t* to, size_t lanes, int key, bool swapped) {
  uint8_t* pair = to + static_cast<size_t>(key / 2) * lanes * To::kLaneBytes;
  if constexpr (To::kRowsApart) {
    const size_t step = static_cast<size_t>((key & 1) ^ (swapped ? 1 : 0));
    std::memset(pair + step * lanes * sizeof(float), 0, lanes * sizeof(float));
  } else {
    for (size_t i = 0; i < lanes; ++i) reinterpret_cast<uint16_t*>(pair)[2 * i + static_cast<size_t>(key & 1)] = 0;
  }
}

}  // namespace
}  // namespace CALSTACK_ISA
}  // namespace calstack
