// Products of int8 activations with 4-bit and 8-bit weights: docs/concepts/numerics.md, "Linear". Once per instruction set.
//
// A tile is R rows by one block of 16 outputs: per group one integer accumulator per row, scaled into one float accumulator per row.
// One row is the GEMV of decode, up to kTileRows rows the small batches: the weights pass through once, prefetched. More rows are cut
// into panels that reuse a block's weights from L1 while their activations come from L2.
#include "kernel_parts.h"
#include "linear_out.h"

namespace calstack {
namespace CALSTACK_ISA {
namespace {

// Activations from one row on.
struct Rows {
  const int8_t* codes;
  const float* scale;
  const float* asum;
  const int32_t* isum;
  size_t k, groups;
  Rows(const QuantRows& a, size_t row)
      : codes(a.codes + row * (size_t)a.k),
        scale(a.scale + row * (size_t)(a.k / a.group)),
        asum(a.asum + row * (size_t)(a.k / a.group)),
        isum(a.isum + row * (size_t)(a.k / a.group)),
        k((size_t)a.k),
        groups((size_t)(a.k / a.group)) {}
};

enum class Kind { w4_min, w4, w8 };

constexpr int kCodesPerStep(Kind kind) { return kind == Kind::w8 ? 4 : 8; }

// What the integer accumulator starts at, so that codes without a minimum count from their zero.
template <Kind kind> CALSTACK_INLINE I32x16 start(const int32_t* isum) {
  if (kind == Kind::w4_min) return I32x16::zero();
  return I32x16::zero() - shift_left<kind == Kind::w4 ? 3 : 7>(I32x16::broadcast(*isum));
}

// 64 bytes of codes times the activations of R rows, `a` at the first code.
template <Kind kind, int R, int chains>
CALSTACK_INLINE void step(I32x16 (&acc)[R * chains], const uint8_t* w, const int8_t* a, size_t k, int j) {
  const I32x16 packed = I32x16::load(w);
  if (kind == Kind::w8) {
    for (int r = 0; r < R; ++r) {
      I32x16& c = acc[chains * r + j % chains];
      c = dot4<false>(c, packed, broadcast4(a + (size_t)r * k));
    }
    return;
  }
  const I32x16 low = low_nibbles(packed), high = high_nibbles(packed);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) acc[chains * r] = dot4<true>(acc[chains * r], low, broadcast4(a + (size_t)r * k));
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) acc[chains * r + chains - 1] = dot4<true>(acc[chains * r + chains - 1], high, broadcast4(a + (size_t)r * k + 4));
}

// out[R][16] = the sums of one block. `fixed`: the group when known at compile time, else 0. `ahead`: bytes from here to the weights
// to prefetch, 0 for none.
template <Kind kind, int fixed, int R>
void tile(const uint8_t* w, int group, const Rows& a, size_t ahead, float* out) {
  constexpr int chains = R < 6 ? 2 : 1;  // enough independent sums to hide the latency of a product
  constexpr int per_step = kCodesPerStep(kind);
  const int steps = (fixed ? fixed : group) / per_step;
  const size_t bytes = 64 * (size_t)steps + (kind == Kind::w4_min ? 64 : 32);
  F32x16 sum[R];
  for (int r = 0; r < R; ++r) sum[r] = F32x16::zero();
  for (size_t g = 0; g < a.groups; ++g, w += bytes) {
    if (ahead)
      for (size_t line = 0; line < bytes; line += 64) prefetch(w + ahead + line);
    I32x16 acc[R * chains];
    for (int r = 0; r < R; ++r) {
      acc[chains * r] = start<kind>(a.isum + (size_t)r * a.groups + g);
      for (int c = 1; c < chains; ++c) acc[chains * r + c] = I32x16::zero();
    }
    const int8_t* codes = a.codes + g * (size_t)(steps * per_step);
#pragma GCC unroll 8
    for (int j = 0; j < steps; ++j) step<kind, R, chains>(acc, w + 64 * j, codes + per_step * j, a.k, j);
    const F32x16 d = F32x16::load_f16(w + 64 * (size_t)steps);
    const F32x16 m = kind == Kind::w4_min ? F32x16::load_f16(w + 64 * (size_t)steps + 32) : d;
    for (int r = 0; r < R; ++r) {
      const size_t at = (size_t)r * a.groups + g;
      for (int c = 1; c < chains; ++c) acc[chains * r] = acc[chains * r] + acc[chains * r + c];
      sum[r] = fma(to_f32(acc[chains * r]) * F32x16::broadcast(a.scale[at]), d, sum[r]);
      if (kind == Kind::w4_min) sum[r] = fma(m, F32x16::broadcast(a.asum[at]), sum[r]);
    }
  }
  for (int r = 0; r < R; ++r) sum[r].store(out + 16 * r);
}

using Tile = void (*)(const uint8_t* w, int group, const Rows& a, size_t ahead, float* out);

// The tiles of 1 to kTileRows rows.
struct Tiles {
  Tile of[kTileRows + 1];
};

template <Kind kind, int fixed, int R = 1> constexpr void list_tiles(Tiles& t) {
  t.of[R] = tile<kind, fixed, R>;
  if constexpr (R < kTileRows) list_tiles<kind, fixed, R + 1>(t);
}

template <Kind kind, int fixed> constexpr Tiles make_tiles() {
  Tiles t{};
  list_tiles<kind, fixed>(t);
  return t;
}

template <Kind kind> const Tiles& tiles_of(int group) {
  static constexpr Tiles of_32 = make_tiles<kind, 32>();
  static constexpr Tiles of_any = make_tiles<kind, 0>();
  return group == 32 ? of_32 : of_any;
}

const Tiles& tiles_for(const Weight& w) {
  if (w.format == WFmt::w8a8) return tiles_of<Kind::w8>(w.group);
  return w.minimum ? tiles_of<Kind::w4_min>(w.group) : tiles_of<Kind::w4>(w.group);
}

constexpr size_t kStreamAhead = 4096;       // bytes between the GEMV and its prefetches
constexpr size_t kRowBytes = 256 * 1024;    // activations that stay in L2 while the blocks pass

// Rows [row0, row0 + rows) of blocks [nb0, nb1).
void chunk(const Weight& w, const Tiles& tiles, const QuantRows& a, const Finish& finish, int row0, int rows, int nb0, int nb1) {
  const size_t bytes = block_bytes(w);
  const int together = finish.blocks_per_step();
  const Panels panels(rows);
  const size_t ahead = panels.count == 1 ? kStreamAhead : bytes * (size_t)together;
  alignas(64) float sums[2][kTileRows * 16];
  for (int nb = nb0; nb < nb1; nb += together)
    for (int i = 0; i < panels.count; ++i) {
      const int first = row0 + panels.first(i), count = row0 + panels.first(i + 1) - first;
      const Rows part(a, (size_t)first);
      for (int b = 0; b < together; ++b)
        tiles.of[count](w.data + (size_t)(nb + b) * bytes, w.group, part, i == 0 ? ahead : 0, sums[b]);
      finish(nb, (size_t)first, count, sums[0], sums[1]);
    }
}

void linear_q(const Weight& w, const QuantRows& a, int rows, const float* bias, Epilogue ep, Act act, float* out, size_t os, int nb0,
              int nb1) {
  const Finish finish{w, bias, ep, act, out, os};
  const Tiles& tiles = tiles_for(w);
  const int fit = (int)(kRowBytes / (size_t)w.k);
  const int most = fit < kTileRows ? kTileRows : fit - fit % kTileRows;
  for (int row = 0; row < rows; row += most) chunk(w, tiles, a, finish, row, rows - row < most ? rows - row : most, nb0, nb1);
}

}  // namespace

void fill_linear_q(KernelTable& t) { t.linear_q = linear_q; }

}  // namespace CALSTACK_ISA
}  // namespace calstack
