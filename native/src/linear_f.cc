// Products of f32 activations with w4a16, bf16, f16 and f32 weights: docs/concepts/numerics.md, "Linear". Once per instruction set.
// Correct and bit-exact, without a speed bar: a tile is R rows by 16 outputs, one chain over k each.
#include "kernel_parts.h"
#include "linear_out.h"

namespace calstack {
namespace CALSTACK_ISA {
namespace {

// The chains of R rows, one weight vector after the other.
template <int R> struct Chains {
  const float* x;
  size_t xs;
  F32x16 sum[R];
  Chains(const float* rows, size_t stride) : x(rows), xs(stride) {
    for (int r = 0; r < R; ++r) sum[r] = F32x16::zero();
  }
  CALSTACK_INLINE void add(F32x16 w, size_t k) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) sum[r] = fma(w, F32x16::broadcast(x[(size_t)r * xs + k]), sum[r]);
  }
};

template <WFmt format> CALSTACK_INLINE F32x16 load_plain(const uint8_t* w, size_t k) {
  if (format == WFmt::bf16) return F32x16::load_bf16(w + 32 * k);
  if (format == WFmt::f16) return F32x16::load_f16(w + 32 * k);
  return F32x16::load((const float*)(w + 64 * k));
}

template <bool minimum> struct GroupScale {
  F32x16 d, m;
  CALSTACK_INLINE F32x16 value(I32x16 q) const {
    return minimum ? fma(d, to_f32(q), m) : d * to_f32(q - I32x16::broadcast(8));
  }
};

// The eight weights per lane in one word each, in the order of k.
template <bool minimum, int R> CALSTACK_INLINE void add_word(Chains<R>& chains, I32x16 word, const GroupScale<minimum>& s, size_t k) {
  const I32x16 low = low_nibbles(word), high = high_nibbles(word), byte = I32x16::broadcast(255);
  chains.add(s.value(low & byte), k);
  chains.add(s.value(shift_right<8>(low) & byte), k + 1);
  chains.add(s.value(shift_right<16>(low) & byte), k + 2);
  chains.add(s.value(shift_right<24>(low)), k + 3);
  chains.add(s.value(high & byte), k + 4);
  chains.add(s.value(shift_right<8>(high) & byte), k + 5);
  chains.add(s.value(shift_right<16>(high) & byte), k + 6);
  chains.add(s.value(shift_right<24>(high)), k + 7);
}

template <bool minimum, int R> CALSTACK_INLINE void add_w4(Chains<R>& chains, const Weight& w, const uint8_t* data) {
  const size_t codes = code_bytes(w), bytes = group_bytes(w);
  for (size_t k = 0; k < (size_t)w.k; data += bytes) {
    const F32x16 d = F32x16::load_f16(data + codes);
    const GroupScale<minimum> s{d, minimum ? F32x16::load_f16(data + codes + 32) : d};
    for (size_t at = 0; at < codes; at += 64, k += 8) add_word<minimum, R>(chains, I32x16::load(data + at), s, k);
  }
}

// out[R][16] = the sums of one block.
template <WFmt format, bool minimum, int R> void tile(const Weight& w, const uint8_t* data, const float* x, size_t xs, float* out) {
  Chains<R> chains(x, xs);
  if constexpr (format == WFmt::w4a16) add_w4<minimum, R>(chains, w, data);
  else
    for (size_t k = 0; k < (size_t)w.k; ++k) chains.add(load_plain<format>(data, k), k);
  for (int r = 0; r < R; ++r) chains.sum[r].store(out + 16 * r);
}

using Tile = void (*)(const Weight& w, const uint8_t* data, const float* x, size_t xs, float* out);

struct Tiles {
  Tile of[kTileRows + 1];
};

template <WFmt format, bool minimum, int R = 1> constexpr void list_tiles(Tiles& t) {
  t.of[R] = tile<format, minimum, R>;
  if constexpr (R < kTileRows) list_tiles<format, minimum, R + 1>(t);
}

template <WFmt format, bool minimum = false> constexpr Tiles make_tiles() {
  Tiles t{};
  list_tiles<format, minimum>(t);
  return t;
}

constexpr Tiles kF32 = make_tiles<WFmt::f32>(), kF16 = make_tiles<WFmt::f16>(), kBf16 = make_tiles<WFmt::bf16>();
constexpr Tiles kW4 = make_tiles<WFmt::w4a16, false>(), kW4Min = make_tiles<WFmt::w4a16, true>();

const Tiles& tiles_for(const Weight& w) {
  if (w.format == WFmt::w4a16) return w.minimum ? kW4Min : kW4;
  if (w.format == WFmt::bf16) return kBf16;
  return w.format == WFmt::f16 ? kF16 : kF32;
}

void linear_f(const Weight& w, const float* x, size_t xs, int rows, const float* bias, Epilogue ep, Act act, float* out, size_t os, int nb0,
              int nb1) {
  const Finish finish{w, bias, ep, act, out, os};
  const Tiles& tiles = tiles_for(w);
  const size_t bytes = block_bytes(w);
  const Panels panels(rows, kTileRows);
  alignas(64) float sums[2][kTileRows * 16];
  for (int nb = nb0; nb < nb1; nb += 2) {
    const int blocks = nb1 - nb < 2 ? 1 : 2;
    for (int i = 0; i < panels.count; ++i) {
      const int first = panels.first(i), count = panels.first(i + 1) - first;
      for (int b = 0; b < blocks; ++b) tiles.of[count](w, w.data + (size_t)(nb + b) * bytes, x + (size_t)first * xs, xs, sums[b]);
      finish(nb, blocks, (size_t)first, count, sums);
    }
  }
}

}  // namespace

void fill_linear_f(KernelTable& t) { t.linear_f = linear_f; }

}  // namespace CALSTACK_ISA
}  // namespace calstack
