// One split of keys for a batch: scores of all tiles, one softmax, then the values.
#pragma once
#include "attention_softmax.h"

namespace calstack {
namespace CALSTACK_ISA {
namespace {

// --- scores --------------------------------------------------------------------------------------------------------------

template <class Op, class Hint>
void score_blocks(const Batch& b, int tile, const uint8_t* keys, Hint ahead) {
  const int key0 = tile * kKeyTile, column = tile % kSplitTiles * kKeyTile;
  for (int i = 0; i < b.n; i += kRows) {
    const int rows = smaller(kRows, b.n - i);
    const Range r = b.seen_by_any(i, rows, key0, kKeyTile);
    if (r.empty()) continue;
    const Product p{reinterpret_cast<const uint8_t*>(b.q(i)), kRowStride * sizeof(float), keys, kKeyTile, b.s.head_dim / 2, b.scores(i) + column, kScoreStride};
    multiply<kRows, Op, false>(rows, (r.hi + 15) / 16, p, ahead);
  }
}

template <class K>
void score_tile(const Batch& b, int tile) {
  using Direct = typename K::Direct;
  using Wide = typename K::Wide;
  if constexpr (std::is_same_v<Direct, Wide>) return score_blocks<Direct>(b, tile, b.keys(tile), NoHint{});
  uint8_t* wide = reinterpret_cast<uint8_t*>(b.x.tile);
  widen<Direct, Wide>(b.keys(tile), kKeyTile, 0, b.s.head_dim / 2, wide, kKeyTile);
  score_blocks<Wide>(b, tile, wide, NoHint{});
}

// --- values --------------------------------------------------------------------------------------------------------------

struct Values {
  const uint8_t* rows;
  size_t lanes;
};

template <class Op, class Hint>
void value_blocks(const Batch& b, int tile, Values v, Hint ahead) {
  const int key0 = tile * kKeyTile, column = tile % kSplitTiles * kKeyTile;
  for (int i = 0; i < b.n; i += kRows) {
    const int rows = smaller(kRows, b.n - i);
    const Range r = b.seen_by_any(i, rows, key0, kKeyTile);
    if (r.empty()) continue;
    const size_t pair = static_cast<size_t>(r.lo / 2);
    const uint8_t* left = reinterpret_cast<const uint8_t*>(b.scores(i)) + (static_cast<size_t>(column / 2) + pair) * Op::kLeftBytes;
    const Product p{left, kScoreStride * sizeof(float), v.rows + pair * v.lanes * Op::kLaneBytes, v.lanes, (r.hi + 1) / 2 - r.lo / 2, b.o(i), kRowStride};
    multiply<kRows, Op, true>(rows, b.dim_vectors(), p, ahead);
  }
}

// A copy of the tile's pairs that some vector sees; a key that none sees is zero in it, whatever the cache holds.
template <class V>
Values copy_values(const Batch& b, int tile) {
  using Wide = typename V::Wide;
  const Range r = b.seen_by_any(0, b.n, tile * kKeyTile, kKeyTile);
  const Values v{reinterpret_cast<const uint8_t*>(b.x.tile), static_cast<size_t>(b.dim_vectors()) * 16};
  uint8_t* to = reinterpret_cast<uint8_t*>(b.x.tile);
  widen<typename V::Direct, Wide>(b.values(tile), b.dim(), r.lo / 2, (r.hi + 1) / 2, to, v.lanes);
  constexpr bool swapped = !std::is_same_v<V, StoredF32>;
  if (r.lo % 2 != 0) clear_row<Wide>(to, v.lanes, r.lo - 1, swapped);
  if (r.hi % 2 != 0) clear_row<Wide>(to, v.lanes, r.hi, swapped);
  return v;
}

// Codes are numbers whatever they are, and their p is 0 where no vector sees them; a float that none sees may be NaN.
template <class V>
CALSTACK_INLINE bool reads_values_directly(const Batch& b, int tile) {
  const Range r = b.seen_by_any(0, b.n, tile * kKeyTile, kKeyTile);
  return b.dim() % 16 == 0 && (std::is_same_v<V, StoredInt8> || (r.lo % 2 == 0 && r.hi % 2 == 0));
}

template <class V>
void value_tile(const Batch& b, int tile) {
  if (std::is_same_v<typename V::Direct, typename V::Wide> && reads_values_directly<V>(b, tile))
    return value_blocks<typename V::Direct>(b, tile, {b.values(tile), b.dim()}, NoHint{});
  value_blocks<typename V::Wide>(b, tile, copy_values<V>(b, tile), NoHint{});
}

// --- the split -----------------------------------------------------------------------------------------------------------

void clear_o(const Batch& b) {
  for (int i = 0; i < b.n; ++i)
    for (int d = 0; d < b.dim_vectors(); ++d) F32x16::zero().store(b.o(i) + d * 16);
}

// Few vectors: tile by tile for all heads, whose planes lie side by side, and touching what comes next.
template <class S>
void take_split_of_few(const Batch& b, int split, Range tiles) {
  touch_first(b, tiles);
  int plane = 0;
  for (int tile = tiles.lo; tile < tiles.hi; ++tile)
    for (int j = 0; j < b.heads; ++j)
      score_blocks<typename S::K::Direct>(b.head(j), tile, b.head(j).keys(tile), touch_ahead(b, tiles, plane++, b.k_plane_bytes(), b.dim() / 2));
  for (int j = 0; j < b.heads; ++j) softmax<S>(b.head(j), split, tiles);
  for (int tile = tiles.lo; tile < tiles.hi; ++tile)
    for (int j = 0; j < b.heads; ++j) {
      const Batch head = b.head(j);
      const Touch ahead = touch_ahead(b, tiles, plane++, b.v_plane_bytes(), kKeyTile / 2);
      if (reads_values_directly<typename S::V>(head, tile))
        value_blocks<typename S::V::Direct>(head, tile, {head.values(tile), b.dim()}, ahead);
      else
        value_blocks<typename S::V::Wide>(head, tile, copy_values<typename S::V>(head, tile), ahead);
    }
}

// M, L and O of one split for every vector.
template <class S>
void take_split(const Batch& b, int split) {
  const Range tiles = b.tiles(split);
  clear_o(b);
  if (b.few()) return take_split_of_few<S>(b, split, tiles);
  for (int tile = tiles.lo; tile < tiles.hi; ++tile) score_tile<typename S::K>(b, tile);
  softmax<S>(b, split, tiles);
  for (int tile = tiles.lo; tile < tiles.hi; ++tile) value_tile<typename S::V>(b, tile);
}

// f() for the form the cache has.
template <class F>
CALSTACK_INLINE void with_stored(KVType type, F f) {
  if (type == KVType::f32) return f(Stored<StoredF32, StoredF32>{});
  if (type == KVType::bf16) return f(Stored<StoredBf16, StoredBf16>{});
  return type == KVType::i8 ? f(Stored<StoredInt8, StoredInt8>{}) : f(Stored<StoredBf16, StoredInt8>{});
}

}  // namespace
}  // namespace CALSTACK_ISA
}  // namespace calstack
