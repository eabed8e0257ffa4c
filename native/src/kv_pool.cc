#include <cstring>
#include <new>

#include "calstack/executor.h"
#include "kv_layout.h"

namespace calstack {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kMostAddress = size_t{1} << 45;

size_t pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

size_t reserve_bytes(size_t stride, int blocks) {
  if (stride != 0 && static_cast<size_t>(blocks) > kMostAddress / stride) throw std::bad_alloc();
  return stride * static_cast<size_t>(blocks);
}

}  // namespace

size_t KVShape::layer_bytes() const {
  return KVPlaces(type, kv_heads, head_dim).bytes();
}

KVPool::KVPool(const KVShape& shape)
    : shape_(shape),
      stride_(pages(shape.layer_bytes() * static_cast<size_t>(shape.layers))),
      // Attention reads a long context in pieces of 8 KiB: over small pages it gets half the memory's bandwidth.
      region_(reserve_bytes(stride_, shape.blocks), Pages::huge),
      present_(static_cast<size_t>(shape.blocks), 0) {}

void KVPool::touch(int block) {
  uint8_t& there = present_[static_cast<size_t>(block)];
  if (there == 0) committed_.fetch_add(1, std::memory_order_relaxed);
  there = 1;
}

void KVPool::clear(int block) {
  uint8_t& there = present_[static_cast<size_t>(block)];
  if (there == 0) return;
  region_.discard(static_cast<size_t>(block) * stride_, stride_);
  committed_.fetch_sub(1, std::memory_order_relaxed);
  there = 0;
}

void KVPool::clear_all() {
  for (int block = 0; block < shape_.blocks; ++block) clear(block);
}

void KVPool::copy(int src, int dst) {
  touch(dst);
  std::memmove(base() + static_cast<size_t>(dst) * stride_, base() + static_cast<size_t>(src) * stride_, block_bytes());
}

void KVPool::save(int block, uint8_t* out) const {
  std::memcpy(out, base() + static_cast<size_t>(block) * stride_, block_bytes());
}

void KVPool::restore(int block, const uint8_t* in) {
  touch(block);
  std::memcpy(base() + static_cast<size_t>(block) * stride_, in, block_bytes());
}

}  // namespace calstack
