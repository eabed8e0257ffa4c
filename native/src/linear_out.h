// What happens to the sums of one block of 16 outputs: bias, then store, residual, activation or gate. Shared by linear_q and linear_f.
#pragma once
#include "packed.h"
#include "simd/math.h"

namespace calstack {
namespace CALSTACK_ISA {

// Register tiles hold an integer and a float accumulator per row and block, and a few registers more. Narrow tiles are one block and up
// to kTileRows rows, wide ones two blocks and up to kWideRows rows (0: too few registers).
constexpr int kTileRows = kVectorRegisters == 32 ? 8 : 4;
constexpr int kWideRows = kVectorRegisters == 32 ? 6 : 0;

struct Finish {
  const Weight& w;
  const float* bias;
  Epilogue ep;
  Act act;
  float* out;
  size_t os;

  // Rows [row0, row0 + rows) of blocks nb and, when `blocks` is 2, nb + 1; sums = [block][row][16]. Gated: always two, gate and up.
  void operator()(int nb, int blocks, size_t row0, int rows, const float (*sums)[kTileRows * 16]) const {
    if (ep == Epilogue::gated) return block(nb, row0, rows, sums[0], sums[1]);
    for (int b = 0; b < blocks; ++b) block(nb + b, row0, rows, sums[b], nullptr);
  }

 private:
  void block(int nb, size_t row0, int rows, const float* y, const float* up) const {
    const BlockOut to = block_out(w, ep, nb);
    const F32x16 b = bias_of(nb, to.lanes), bu = up ? bias_of(nb + 1, to.lanes) : b;
    for (int r = 0; r < rows; ++r) {
      float* o = out + (row0 + (size_t)r) * os + to.column;
      F32x16 v = biased(y + 16 * r, b);
      if (up) v = activate(v) * biased(up + 16 * r, bu);
      else if (ep == Epilogue::activated) v = activate(v);
      if (to.lanes == 16) (ep == Epilogue::residual ? F32x16::load(o) + v : v).store(o);
      else (ep == Epilogue::residual ? F32x16::load_first(o, to.lanes) + v : v).store_first(o, to.lanes);
    }
  }
  CALSTACK_INLINE F32x16 bias_of(int nb, int lanes) const {
    return bias ? F32x16::load_first(bias + (size_t)nb * kLane, lanes) : F32x16::zero();
  }
  // Without a bias nothing is added: -0 + 0 would be +0.
  CALSTACK_INLINE F32x16 biased(const float* y, F32x16 b) const { return bias ? F32x16::load(y) + b : F32x16::load(y); }
  CALSTACK_INLINE F32x16 activate(F32x16 v) const {
    if (act == Act::silu) return silu(v);
    if (act == Act::tanh) return tanh(v);
    return act == Act::gelu_tanh ? gelu_tanh(v) : gelu(v);
  }
};

// Cuts rows into panels of at most `most` rows, as even as they come, so that no panel is left nearly empty.
struct Panels {
  int rows, count;
  Panels(int total, int most) : rows(total), count((total + most - 1) / most) {}
  CALSTACK_INLINE int first(int i) const { return (int)((long long)rows * i / count); }
};

}  // namespace CALSTACK_ISA
}  // namespace calstack
