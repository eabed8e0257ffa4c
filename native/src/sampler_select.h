// The highest values of a row, in order, without sorting the row: a bound from the maxima of strided groups, then a scan, then a radix
// sort of the few that pass. Nothing here throws or allocates, and no std:: template is used (kernel_parts.h says why).
#pragma once
#include "simd/simd.h"

namespace calstack {
namespace CALSTACK_ISA {
namespace {

constexpr float kMinusInf = -__builtin_inff();

// A value's rank key (ascending key = descending value, zeros equal) above its id.
using Item = uint64_t;

CALSTACK_INLINE uint32_t rank_key(float z) {
  const float no_minus_zero = z + 0.0f;
  uint32_t u;
  __builtin_memcpy(&u, &no_minus_zero, 4);
  return u & 0x80000000u ? u : ~u & 0x7fffffffu;
}
CALSTACK_INLINE Item item_of(float z, int id) { return static_cast<Item>(rank_key(z)) << 32 | static_cast<uint32_t>(id); }
CALSTACK_INLINE int id_of(Item item) { return static_cast<int>(static_cast<uint32_t>(item)); }

// Lanes of the last, partial vector read as -inf.
CALSTACK_INLINE F32x16 load_or_lowest(const float* z, int left) {
  if (left >= 16) return F32x16::load(z);
  return select(first_lanes(left), F32x16::load_first(z, left), F32x16::broadcast(kMinusInf));
}

void insertion_sort(Item* a, int n) {
  for (int i = 1; i < n; ++i) {
    const Item x = a[i];
    int j = i;
    for (; j > 0 && a[j - 1] > x; --j) a[j] = a[j - 1];
    a[j] = x;
  }
}

// Stable by key; items come in ascending id, so that equal keys stay so.
void radix_sort(Item* a, Item* other, int n) {
  for (int shift = 32; shift < 64; shift += 8) {
    int start[256] = {};
    for (int i = 0; i < n; ++i) ++start[a[i] >> shift & 255];
    int sum = 0;
    for (int& s : start) {
      const int count = s;
      s = sum;
      sum += count;
    }
    for (int i = 0; i < n; ++i) other[start[a[i] >> shift & 255]++] = a[i];
    Item* swap = a;
    a = other;
    other = swap;
  }
}

void sort_items(Item* a, Item* other, int n) { n <= 48 ? insertion_sort(a, n) : radix_sort(a, other, n); }

// The k-th smallest key (k from 0), digit by digit; keys is reordered.
uint32_t kth_key(uint32_t* keys, int n, int k) {
  for (int shift = 24;; shift -= 8) {
    int count[256] = {};
    for (int i = 0; i < n; ++i) ++count[keys[i] >> shift & 255];
    uint32_t digit = 0;
    for (; k >= count[digit]; ++digit) k -= count[digit];
    int kept = 0;
    for (int i = 0; i < n; ++i)
      if ((keys[i] >> shift & 255) == digit) keys[kept++] = keys[i];
    n = kept;
    if (shift == 0) return keys[0];
  }
}

CALSTACK_INLINE float value_of_key(uint32_t key) {
  const uint32_t u = key & 0x80000000u ? key : ~key & 0x7fffffffu;
  float z;
  __builtin_memcpy(&z, &u, 4);
  return z;
}

// A value that at least n of z reach: the n-th of the maxima of groups of `vectors` strided values. -inf when there are too few.
float bound_of_top(const float* z, int vocab, int n, uint32_t* keys) {
  const int share = vocab / (4 * n), vectors = share < 1 ? 1 : share > 64 ? 64 : share;
  int count = 0;
  for (int i = 0; i < vocab; i += 16 * vectors) {
    F32x16 top = load_or_lowest(z + i, vocab - i);
    for (int v = 1; v < vectors && i + 16 * v < vocab; ++v) top = max(top, load_or_lowest(z + i + 16 * v, vocab - i - 16 * v));
    alignas(64) float lanes[16];
    top.store(lanes);
    for (float lane : lanes) keys[count++] = rank_key(lane);
  }
  return n <= count ? value_of_key(kth_key(keys, count, n - 1)) : kMinusInf;
}

// Items of all finite values that reach the bound, in ascending id; returns how many.
int collect(const float* z, int vocab, float bound, Item* items) {
  const F32x16 least = F32x16::broadcast(bound), lowest = F32x16::broadcast(kMinusInf);
  int n = 0;
  for (int i = 0; i < vocab; i += 16) {
    const F32x16 x = load_or_lowest(z + i, vocab - i);
    uint32_t reach = bits(less(lowest, x)) & ~bits(less(x, least));
    for (; reach; reach &= reach - 1) {
      const int id = i + __builtin_ctz(reach);
      items[n++] = item_of(z[id], id);
    }
  }
  return n;
}

// At least the first n finite entries of the ranking by (z descending, id ascending), or all of them; returns how many there are in
// `items`. Room: `items` and `other` hold vocab items each.
int rank_top(const float* z, int vocab, int n, Item* items, Item* other) {
  const float bound = n < vocab / 4 ? bound_of_top(z, vocab, n, reinterpret_cast<uint32_t*>(other)) : kMinusInf;
  const int count = collect(z, vocab, bound, items);
  sort_items(items, other, count);
  return count;
}

}  // namespace
}  // namespace CALSTACK_ISA
}  // namespace calstack
