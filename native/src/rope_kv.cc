// Rope tables, and the step between the QKV projection and attention: q/k norm, rope, and K and V written to the cache.
#include "attention_scratch.h"
#include "kernel_parts.h"
#include "half.h"
#include "kv_layout.h"
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

// How values of a head become stored ones: `inv` is 127 / max for int8, else unused.
CALSTACK_INLINE void put(float* to, float x, float) { *to = x; }
CALSTACK_INLINE void put(uint16_t* to, float x, float) { *to = f32_to_bf16(__builtin_fabsf(x) < kLeastBf16 ? 0.0f : x); }
CALSTACK_INLINE void put(int8_t* to, float x, float inv) { *to = (int8_t)__builtin_rintf(x * inv); }

// Finite whatever x is: a key that a row does not see must not reach it as 0 times infinity.
CALSTACK_INLINE F32x16 clamped(F32x16 x) {
  const F32x16 most = F32x16::broadcast(0x1.fep+127f);
  return min(max(x, negate(most)), most);
}

struct Scale {
  float inv, value;
};

Scale scale_of(const float* x, int n) {
  F32x16 top = F32x16::zero();
  for (int i = 0; i < n; i += 16) top = max(top, abs(F32x16::load_first(x + i, rest(i, n))));
  const float amax = max_lane(top);
  if (amax < 0x1p-100f) return {0.0f, 0.0f};
  return {127.0f / amax, amax / 127.0f};
}

// K = [dim][64 keys], or in pairs of dimensions [dim/2][64 keys][2].
CALSTACK_INLINE void write_k(float* plane, int j, int dim, const float* k, float inv) {
  for (int d = 0; d < dim; ++d) put(plane + static_cast<size_t>(d * kBlockPositions + j), k[d], inv);
}
template <class T>
CALSTACK_INLINE void write_k(T* plane, int j, int dim, const float* k, float inv) {
  T* to = plane + 2 * j;
  for (int d = 0; d < dim; d += 2, to += 2 * kBlockPositions) {
    put(to, k[d], inv);
    put(to + 1, k[d + 1], inv);
  }
}

// V = [64 keys][dim], or in pairs of keys [64/2][dim][2]. Only the position's own bytes are written: another thread may write its neighbour.
CALSTACK_INLINE void write_v(float* plane, int j, int dim, const float* v, float) {
  for (int d = 0; d < dim; d += 16) F32x16::load_first(v + d, rest(d, dim)).store_first(plane + static_cast<size_t>(j * dim + d), rest(d, dim));
}
template <class T>
CALSTACK_INLINE void write_v(T* plane, int j, int dim, const float* v, float inv) {
  T* to = plane + static_cast<size_t>(j / 2 * dim) * 2 + j % 2;
  for (int d = 0; d < dim; ++d) put(to + 2 * d, v[d], inv);
}

CALSTACK_INLINE void clamp_head(const float* x, int dim, float* to) {
  for (int d = 0; d < dim; d += 16) clamped(F32x16::load_first(x + d, rest(d, dim))).store(to + d);
}

template <class K, class V>
void write_kv(const KVView& kv, int lane, int position, const float* k, const float* v, size_t h0, size_t h1) {
  alignas(64) float kc[kMaxHeadDim + 16], vc[kMaxHeadDim + 16];
  uint8_t* layer = kv.base + static_cast<size_t>(kv.tables[lane][position / kBlockPositions]) * kv.block_bytes + kv.layer_offset;
  const KVPlaces at(kv.type, kv.kv_heads, kv.head_dim);
  const int j = position % kBlockPositions, dim = kv.head_dim;
  k += h0 * static_cast<size_t>(dim);
  v += h0 * static_cast<size_t>(dim);
  for (size_t h = h0; h < h1; ++h, k += dim, v += dim) {
    clamp_head(k, dim, kc);
    clamp_head(v, dim, vc);
    const Scale ks = sizeof(K) == 1 ? scale_of(kc, dim) : Scale{}, vs = sizeof(V) == 1 ? scale_of(vc, dim) : Scale{};
    write_k(reinterpret_cast<K*>(layer + at.k(h)), j, dim, kc, ks.inv);
    write_v(reinterpret_cast<V*>(layer + at.v(h)), j, dim, vc, vs.inv);
    if (sizeof(K) == 1) reinterpret_cast<float*>(layer + at.k_scale(h))[j] = ks.value;
    if (sizeof(V) == 1) reinterpret_cast<float*>(layer + at.v_scale(h))[j] = vs.value;
  }
}

using Write = void (*)(const KVView& kv, int lane, int position, const float* k, const float* v, size_t h0, size_t h1);

Write writer(KVType type) {
  if (type == KVType::f32) return write_kv<float, float>;
  if (type == KVType::bf16) return write_kv<uint16_t, uint16_t>;
  return type == KVType::i8 ? write_kv<int8_t, int8_t> : write_kv<uint16_t, int8_t>;
}

void qk_norm_rope_kv(float* qkv, size_t xs, const float* table, size_t ts, int rope_dim, const float* q_norm, const float* k_norm, float eps,
                     const AttnShape& s, const KVView& kv, const int32_t* lanes, const int32_t* positions, int r0, int r1, int h0, int h1) {
  const int group = s.heads / s.kv_heads;
  const Write write = writer(kv.type);
  for (int r = r0; r < r1; ++r) {
    float* x = qkv + static_cast<size_t>(r) * xs;
    const auto heads = [&](int begin, int end, const float* norm) {
      for (int h = begin; h < end; ++h) {
        float* head = x + static_cast<size_t>(h) * static_cast<size_t>(s.head_dim);
        if (norm) norm_head(head, s.head_dim, norm, eps);
        if (table) rotate(head, table + static_cast<size_t>(r) * ts, rope_dim / 2);
      }
    };
    heads(h0 * group, h1 * group, q_norm);
    heads(s.heads + h0, s.heads + h1, k_norm);  // they follow the q heads
    const float* k = x + static_cast<size_t>(s.heads) * static_cast<size_t>(s.head_dim);
    const float* v = k + static_cast<size_t>(s.kv_heads) * static_cast<size_t>(s.head_dim);
    write(kv, lanes[r], positions[r], k, v, static_cast<size_t>(h0), static_cast<size_t>(h1));
  }
}

}  // namespace

void fill_rope_kv(KernelTable& t) {
  t.rope_table = rope_table;
  t.qk_norm_rope_kv = qk_norm_rope_kv;
}

}  // namespace CALSTACK_ISA
}  // namespace calstack
