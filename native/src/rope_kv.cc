// Rope tables, and the step between the QKV projection and attention: q/k norm, rope, and K and V written to the cache.
#include "kernel_parts.h"
#include "half.h"
#include "simd/simd.h"

namespace calstack {
namespace CALSTACK_ISA {
namespace {

CALSTACK_INLINE int rest(int i, int n) { return n - i < 16 ? n - i : 16; }

// --- rope table ----------------------------------------------------------------------------------------------------------

// Branch-free, so that the compiler makes vectors of it.
CALSTACK_INLINE void cos_sin(float angle, double factor, float* cos_out, float* sin_out) {
  const double a = angle;
  const double n = __builtin_rint(a * 0x1.45f306dc9c883p-1);
  double r = __builtin_fma(n, -0x1.921fb54442d18p+0, a);
  r = __builtin_fma(n, -0x1.1a62633145c07p-54, r);
  const double z = r * r;
  double s = 1.0 / 6227020800.0, c = -1.0 / 87178291200.0;
  s = __builtin_fma(s, z, -1.0 / 39916800.0);
  s = __builtin_fma(s, z, 1.0 / 362880.0);
  s = __builtin_fma(s, z, -1.0 / 5040.0);
  s = __builtin_fma(s, z, 1.0 / 120.0);
  s = __builtin_fma(s, z, -1.0 / 6.0);
  c = __builtin_fma(c, z, 1.0 / 479001600.0);
  c = __builtin_fma(c, z, -1.0 / 3628800.0);
  c = __builtin_fma(c, z, 1.0 / 40320.0);
  c = __builtin_fma(c, z, -1.0 / 720.0);
  c = __builtin_fma(c, z, 1.0 / 24.0);
  s = __builtin_fma(r * z, s, r);
  c = __builtin_fma(z * z, c, __builtin_fma(z, -0.5, 1.0));
  const int64_t quadrant = static_cast<int64_t>(n);
  const double sin_of = quadrant & 1 ? c : s, cos_of = quadrant & 1 ? s : c;
  *sin_out = static_cast<float>((quadrant & 2 ? -sin_of : sin_of) * factor);
  *cos_out = static_cast<float>((((quadrant + 1) & 2) ? -cos_of : cos_of) * factor);
}

void rope_table(const float* inv_freq, int half, double factor, const int32_t* positions, float* out, size_t os, int r0, int r1) {
  for (int r = r0; r < r1; ++r) {
    const float position = static_cast<float>(positions[r]);
    float* row = out + static_cast<size_t>(r) * os;
    for (int i = 0; i < half; ++i) cos_sin(position * inv_freq[i], factor, row + i, row + half + i);
  }
}

// --- norm, rope ----------------------------------------------------------------------------------------------------------

void norm_head(float* x, int n, const float* weight, float eps) {
  F32x16 squares = F32x16::zero();
  for (int i = 0; i < n; i += 16) {
    const F32x16 v = F32x16::load_first(x + i, rest(i, n));
    squares = fma(v, v, squares);
  }
  const float r = 1.0f / __builtin_sqrtf(tree_sum(squares) / static_cast<float>(n) + eps);
  for (int i = 0; i < n; i += 16) {
    const int lanes = rest(i, n);
    (F32x16::load_first(x + i, lanes) * F32x16::broadcast(r) * F32x16::load_first(weight + i, lanes)).store_first(x + i, lanes);
  }
}

void rotate(float* x, const float* table, int half) {
  for (int i = 0; i < half; i += 16) {
    const int lanes = rest(i, half);
    const F32x16 a = F32x16::load_first(x + i, lanes), b = F32x16::load_first(x + half + i, lanes);
    const F32x16 c = F32x16::load_first(table + i, lanes), s = F32x16::load_first(table + half + i, lanes);
    fma(negate(b), s, a * c).store_first(x + i, lanes);
    fma(a, s, b * c).store_first(x + half + i, lanes);
  }
}

// --- cache ---------------------------------------------------------------------------------------------------------------

CALSTACK_INLINE void put(float* to, float x) { *to = x; }
CALSTACK_INLINE void put(uint16_t* to, float x) { *to = f32_to_bf16(x); }
CALSTACK_INLINE void put_first(float* to, const float* x, int n) { F32x16::load_first(x, n).store_first(to, n); }
CALSTACK_INLINE void put_first(uint16_t* to, const float* x, int n) {
  if (n == 16) return F32x16::load(x).store_bf16(to);
  for (int i = 0; i < n; ++i) to[i] = f32_to_bf16(x[i]);
}

// One head's K and V of one position. K = [64/16][dim][16 keys], V = [64][dim].
template <class T>
void write_head(T* k_plane, T* v_plane, int j, int dim, const float* k, const float* v) {
  T* to = k_plane + static_cast<size_t>(j / 16 * dim) * 16 + j % 16;
  for (int d = 0; d < dim; ++d) put(to + static_cast<size_t>(d) * 16, k[d]);
  for (int d = 0; d < dim; d += 16) put_first(v_plane + static_cast<size_t>(j * dim + d), v + d, rest(d, dim));
}

template <class T>
void write_kv(const KVView& kv, int lane, int position, const float* k, const float* v) {
  uint8_t* layer = kv.base + static_cast<size_t>(kv.tables[lane][position / kBlockPositions]) * kv.block_bytes + kv.layer_offset;
  T* base = reinterpret_cast<T*>(layer);
  const size_t plane = static_cast<size_t>(kBlockPositions) * static_cast<size_t>(kv.head_dim), heads = static_cast<size_t>(kv.kv_heads);
  for (size_t h = 0; h < heads; ++h) {
    const size_t at = h * static_cast<size_t>(kv.head_dim);
    write_head(base + h * plane, base + (heads + h) * plane, position % kBlockPositions, kv.head_dim, k + at, v + at);
  }
}

void qk_norm_rope_kv(float* qkv, size_t xs, const float* table, size_t ts, int rope_dim, const float* q_norm, const float* k_norm, float eps,
                     const AttnShape& s, const KVView& kv, const int32_t* lanes, const int32_t* positions, int r0, int r1) {
  for (int r = r0; r < r1; ++r) {
    float* x = qkv + static_cast<size_t>(r) * xs;
    for (int h = 0; h < s.heads + s.kv_heads; ++h) {  // k heads follow the q heads
      float* head = x + static_cast<size_t>(h) * static_cast<size_t>(s.head_dim);
      const float* norm = h < s.heads ? q_norm : k_norm;
      if (norm) norm_head(head, s.head_dim, norm, eps);
      if (table) rotate(head, table + static_cast<size_t>(r) * ts, rope_dim / 2);
    }
    const float* k = x + static_cast<size_t>(s.heads) * static_cast<size_t>(s.head_dim);
    const float* v = k + static_cast<size_t>(s.kv_heads) * static_cast<size_t>(s.head_dim);
    kv.type == KVType::f32 ? write_kv<float>(kv, lanes[r], positions[r], k, v) : write_kv<uint16_t>(kv, lanes[r], positions[r], k, v);
  }
}

}  // namespace

void fill_rope_kv(KernelTable& t) {
  t.rope_table = rope_table;
  t.qk_norm_rope_kv = qk_norm_rope_kv;
}

}  // namespace CALSTACK_ISA
}  // namespace calstack
