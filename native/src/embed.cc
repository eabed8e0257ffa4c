// Rows of the embedding, out of any packed format. Once per instruction set: the plain loops take its width.
#include <cstring>

#include "half.h"
#include "kernel_parts.h"
#include "packed.h"

namespace calstack {
namespace CALSTACK_ISA {
namespace {

constexpr int kMostGroup = 128;

float half_at(const uint8_t* p, int lane) {
  uint16_t h;
  std::memcpy(&h, p + 2 * lane, 2);
  return f16_to_f32(h);
}

// The codes of one lane and group as bytes in the order of k.
void read_codes(const Weight& w, const uint8_t* group, int lane, uint8_t* q) {
  uint8_t bytes[kMostGroup];
  const int count = (int)code_bytes(w) / kLane;
  for (int i = 0; i < count; i += 4) std::memcpy(bytes + i, group + (size_t)i * kLane + 4 * lane, 4);
  if (w.format == WFmt::w8a8) {
    std::memcpy(q, bytes, (size_t)count);
    return;
  }
  for (int i = 0; i < count; ++i) {
    const int k = 2 * (i - i % 4) + i % 4;
    q[k] = bytes[i] & 15;
    q[k + 4] = bytes[i] >> 4;
  }
}

void expand_group(const Weight& w, const uint8_t* group, int lane, float scale, float* out) {
  uint8_t q[kMostGroup];
  read_codes(w, group, lane, q);
  const float d = half_at(group + code_bytes(w), lane);
  if (w.minimum) {
    const float m = half_at(group + code_bytes(w) + 2 * kLane, lane);
    for (int k = 0; k < w.group; ++k) out[k] = __builtin_fmaf(d, (float)q[k], m) * scale;
    return;
  }
  const int zero = w.format == WFmt::w8a8 ? 128 : 8;
  for (int k = 0; k < w.group; ++k) out[k] = d * (float)(q[k] - zero) * scale;
}

template <class T, float (*widen)(T)> void expand_plain(const uint8_t* block, int lane, int k, float scale, float* out) {
  for (int i = 0; i < k; ++i) {
    T v;
    std::memcpy(&v, block + sizeof(T) * ((size_t)i * kLane + (size_t)lane), sizeof(T));
    out[i] = widen(v) * scale;
  }
}

float same(float x) { return x; }

void expand_row(const Weight& w, const uint8_t* block, int lane, float scale, float* out) {
  if (w.format == WFmt::f32) return expand_plain<float, same>(block, lane, w.k, scale, out);
  if (w.format == WFmt::f16) return expand_plain<uint16_t, f16_to_f32>(block, lane, w.k, scale, out);
  if (w.format == WFmt::bf16) return expand_plain<uint16_t, bf16_to_f32>(block, lane, w.k, scale, out);
  for (int k = 0; k < w.k; k += w.group, block += group_bytes(w)) expand_group(w, block, lane, scale, out + k);
}

void embed_rows(const Weight& w, const int32_t* ids, float scale, float* out, size_t os, int r0, int r1) {
  for (int r = r0; r < r1; ++r)
    expand_row(w, w.data + (size_t)(ids[r] / kLane) * block_bytes(w), ids[r] % kLane, scale, out + (size_t)r * os);
}

}  // namespace

void fill_embed(KernelTable& t) { t.embed_rows = embed_rows; }

}  // namespace CALSTACK_ISA
}  // namespace calstack
