// Products of int8 activations with 4-bit and 8-bit weights: docs/concepts/numerics.md, "Linear". Once per instruction set.
//
// A tile is R rows by one or two blocks of 16 outputs: per group one integer accumulator per row and block, scaled into one float
// accumulator. Up to kTileRows rows (decode) stream the weights once through narrow tiles, one block after the other as they lie in
// memory. More rows are cut into panels that reuse two blocks' weights from L1 while their activations come from L2; there two blocks
// share each broadcast activation, because with one block loads and not products are the limit.
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

// 64 bytes of codes, as one (w8) or two (w4: low and high nibbles) operands of a product.
template <Kind kind> struct Codes {
  I32x16 part[kind == Kind::w8 ? 1 : 2];
  CALSTACK_INLINE void load(const uint8_t* w) {
    const I32x16 packed = I32x16::load(w);
    part[0] = kind == Kind::w8 ? packed : low_nibbles(packed);
    if constexpr (kind != Kind::w8) part[1] = high_nibbles(packed);
  }
};

// Pointers to R rows that lie `stride` apart. Every third has a register of its own and the compiler does not see how they relate:
// else it spends more registers on multiples of the stride than there are.
template <class T, int R> struct RowPointers {
  static constexpr int kBases = (R + 2) / 3;
  const T* base[kBases];
  size_t stride;
  CALSTACK_INLINE RowPointers(const T* p, size_t elements) : stride(elements) {
    for (int i = 0; i < kBases; ++i) {
      base[i] = p + (size_t)(3 * i) * elements;
      asm("" : "+r"(base[i]));
    }
  }
  CALSTACK_INLINE const T* row(int r) const { return base[r / 3] + (size_t)(r % 3) * stride; }
};

// R rows by B blocks, `chains` integer sums each.
template <Kind kind, int R, int B, int chains> struct IntSums {
  I32x16 acc[R][B][chains];

  CALSTACK_INLINE explicit IntSums(const RowPointers<int32_t, R>& isum, size_t g) {
    for (int r = 0; r < R; ++r) {
      const I32x16 from = start<kind>(isum.row(r) + g);
      for (int b = 0; b < B; ++b) {
        acc[r][b][0] = from;
        for (int c = 1; c < chains; ++c) acc[r][b][c] = I32x16::zero();
      }
    }
  }

  // Step j of a group: 64 bytes of codes of each block, `block` bytes apart, times the activations at `k`.
  CALSTACK_INLINE void step(const uint8_t* w, size_t block, const RowPointers<int8_t, R>& a, size_t k, int j) {
    constexpr int parts = kind == Kind::w8 ? 1 : 2;
    Codes<kind> codes[B];
    for (int b = 0; b < B; ++b) codes[b].load(w + (size_t)b * block);
#pragma GCC unroll 2
    for (int p = 0; p < parts; ++p)
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const I32x16 x = broadcast4(a.row(r) + k + (size_t)(4 * p));
        for (int b = 0; b < B; ++b) {
          I32x16& sum = acc[r][b][(parts * j + p) % chains];
          sum = dot4<kind != Kind::w8>(sum, codes[b].part[p], x);
        }
      }
  }

  CALSTACK_INLINE F32x16 total(int r, int b) const {
    I32x16 sum = acc[r][b][0];
    for (int c = 1; c < chains; ++c) sum = sum + acc[r][b][c];
    return to_f32(sum);
  }
};

// Weights that a tile prefetches while it works, so many bytes per group.
struct Ahead {
  const uint8_t* next;
  size_t step;                   // 0: none
  const uint8_t* end = nullptr;  // where `after` follows on
  const uint8_t* after = nullptr;
};

// out[B][kTileRows][16] = the sums of R rows by B blocks. `fixed`: the group when known at compile time, else 0. `block`: bytes from one
// block to the next; `ahead`: what to prefetch meanwhile.
template <Kind kind, int fixed, int R, int B>
void tile(const uint8_t* w, size_t block, int group, const Rows& rows, Ahead ahead, float* out) {
  constexpr int chains = R * B < 6 ? 2 : 1;  // enough independent sums to hide the latency of a product
  constexpr int per_step = kCodesPerStep(kind);
  const int steps = (fixed ? fixed : group) / per_step;
  const size_t codes = 64 * (size_t)steps, bytes = codes + (kind == Kind::w4_min ? 64 : 32);
  const RowPointers<int8_t, R> a(rows.codes, rows.k);
  const RowPointers<float, R> scale(rows.scale, rows.groups), asum(rows.asum, rows.groups);
  const RowPointers<int32_t, R> isum(rows.isum, rows.groups);
  F32x16 sum[R][B];
  for (int r = 0; r < R; ++r)
    for (int b = 0; b < B; ++b) sum[r][b] = F32x16::zero();
  for (size_t g = 0, k = 0; g < rows.groups; ++g, k += (size_t)(steps * per_step), w += bytes) {
    for (size_t i = 0; i < ahead.step; i += 64) prefetch(ahead.next + i);
    ahead.next += ahead.step;
    if (B == 1 && ahead.next == ahead.end) ahead.next = ahead.after;
    IntSums<kind, R, B, chains> ints(isum, g);
#pragma GCC unroll 8
    for (int j = 0; j < steps; ++j) ints.step(w + 64 * j, block, a, k + (size_t)(per_step * j), j);
    F32x16 d[B], m[B];
    for (int b = 0; b < B; ++b) {
      d[b] = F32x16::load_f16(w + (size_t)b * block + codes);
      if (kind == Kind::w4_min) m[b] = F32x16::load_f16(w + (size_t)b * block + codes + 32);
    }
    for (int r = 0; r < R; ++r) {
      const F32x16 s = F32x16::broadcast(scale.row(r)[g]);
      for (int b = 0; b < B; ++b) sum[r][b] = fma(ints.total(r, b) * s, d[b], sum[r][b]);
      if (kind != Kind::w4_min) continue;
      const F32x16 t = F32x16::broadcast(asum.row(r)[g]);
      for (int b = 0; b < B; ++b) sum[r][b] = fma(m[b], t, sum[r][b]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int b = 0; b < B; ++b) sum[r][b].store(out + 16 * (kTileRows * b + r));
}

using Tile = void (*)(const uint8_t* w, size_t block, int group, const Rows& rows, Ahead ahead, float* out);

// By number of blocks and of rows.
struct Tiles {
  Tile narrow[kTileRows + 1];
  Tile wide[kWideRows + 1];
};

template <Kind kind, int fixed, int R = 1> constexpr void list_tiles(Tiles& t) {
  t.narrow[R] = tile<kind, fixed, R, 1>;
  if constexpr (R <= kWideRows) t.wide[R] = tile<kind, fixed, R, 2>;
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

constexpr size_t kRowBytes = 256 * 1024;  // activations that stay in L2 while the blocks pass

// The part of [w, w + total) that panel i of `count` prefetches, over `groups` steps: spread over the panels, or the first would wait.
Ahead share(const uint8_t* w, size_t total, size_t groups, int i, int count) {
  const size_t steps = groups * (size_t)count, step = (total + 64 * steps - 1) / (64 * steps) * 64;
  const size_t from = groups * step * (size_t)i;
  return {w + from, from < total ? step : 0};
}

// Few rows: the weights of [nb0, nb1) pass once, prefetched a fixed distance ahead where that helps.
void stream(const Weight& w, const Tiles& tiles, const QuantRows& a, const Finish& finish, int rows, int nb0, int nb1) {
  const size_t block = block_bytes(w), group = group_bytes(w);
  const size_t far = stream_ahead() / group * group, step = far > 0 ? group : 0;
  const Rows all(a, 0);
  const uint8_t *start = w.data + (size_t)nb0 * block, *end = w.data + (size_t)nb1 * block;
  for (size_t i = 0; i < far && !w.after; i += 64) prefetch(start + i);
  const uint8_t* after = w.after ? w.after : end;
  alignas(64) float sums[2][kTileRows * 16];
  for (int nb = nb0; nb < nb1; nb += 2) {
    const int blocks = nb1 - nb < 2 ? 1 : 2;
    for (int b = 0; b < blocks; ++b) {
      const uint8_t* from = w.data + (size_t)(nb + b) * block;
      const Ahead ahead = from + far < end ? Ahead{from + far, step, end, after} : Ahead{after + (from + far - end), step};
      tiles.narrow[rows](from, block, w.group, all, ahead, sums[b]);
    }
    finish(nb, blocks, 0, rows, sums);
  }
}

// Rows [row0, row0 + rows) of blocks [nb0, nb1), in panels; meanwhile the next pair of blocks is prefetched.
void chunk(const Weight& w, const Tiles& tiles, const QuantRows& a, const Finish& finish, int row0, int rows, int nb0, int nb1) {
  const size_t block = block_bytes(w);
  const Panels panels(rows, kWideRows > 0 ? kWideRows : kTileRows);
  alignas(64) float sums[2][kTileRows * 16];
  for (int nb = nb0; nb < nb1; nb += 2) {
    const int blocks = nb1 - nb < 2 ? 1 : 2, together = kWideRows > 0 ? blocks : 1;
    const Tile* tile_of = together == 2 ? tiles.wide : tiles.narrow;
    const uint8_t *from = w.data + (size_t)nb * block, *next = from + (size_t)blocks * block;
    for (int i = 0; i < panels.count; ++i) {
      const int first = row0 + panels.first(i), count = row0 + panels.first(i + 1) - first;
      const Rows part(a, (size_t)first);
      Ahead ahead = share(next, (size_t)blocks * block, part.groups, i, panels.count);
      for (int b = 0; b < blocks; b += together, ahead.step = 0)
        tile_of[count](from + (size_t)b * block, block, w.group, part, ahead, sums[b]);
      finish(nb, blocks, (size_t)first, count, sums);
    }
  }
}

void linear_q(const Weight& w, const QuantRows& a, int rows, const float* bias, Epilogue ep, Act act, float* out, size_t os, int nb0,
              int nb1) {
  const Finish finish{w, bias, ep, act, out, os};
  const Tiles& tiles = tiles_for(w);
  if (rows <= 0) return;
  if (rows <= kTileRows) return stream(w, tiles, a, finish, rows, nb0, nb1);
  const int fit = (int)(kRowBytes / (size_t)w.k);
  const Panels chunks(rows, fit < 16 ? 16 : fit);
  for (int i = 0; i < chunks.count; ++i) {
    const int first = chunks.first(i);
    chunk(w, tiles, a, finish, first, chunks.first(i + 1) - first, nb0, nb1);
  }
}

}  // namespace

void fill_linear_q(KernelTable& t) { t.linear_q = linear_q; }

}  // namespace CALSTACK_ISA
}  // namespace calstack
