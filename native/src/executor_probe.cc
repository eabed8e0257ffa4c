// What every call of a launch wrote, as a hash per row: two devices, two submodels or two calbins are compared by them. A row's hash
// does not depend on the other rows of the launch.
#include "calstack/executor.h"
#include "kv_layout.h"

namespace calstack {
namespace {

class Hash {  // FNV-1a over whole words
 public:
  template <class T>
  void take(const T* words, size_t n, size_t stride = 1) {
    for (size_t i = 0; i < n; ++i) take_word(words[i * stride]);
  }
  void floats(const float* x, size_t n) { take(reinterpret_cast<const uint32_t*>(x), n); }
  uint64_t value() const { return value_; }

 private:
  void take_word(uint64_t word) { value_ = (value_ ^ word) * 0x100000001b3u; }
  uint64_t value_ = 0xcbf29ce484222325u;
};

void plane(Hash& h, const uint8_t* base, size_t bytes, size_t first, size_t n, size_t stride) {
  if (bytes == 4) return h.take(reinterpret_cast<const uint32_t*>(base) + first, n, stride);
  if (bytes == 2) return h.take(reinterpret_cast<const uint16_t*>(base) + first, n, stride);
  h.take(base + first, n, stride);
}

// The row's roped queries, and its keys and values as the cache has them.
void roped(Hash& h, const Calbin& calbin, const Call& c, const LaunchData& launch, int r, const float* qkv) {
  const KVShape& s = calbin.kv.shape();
  const size_t dim = static_cast<size_t>(s.head_dim), row = static_cast<size_t>(r);
  h.floats(qkv, static_cast<size_t>(c.attn.heads) * dim);
  const size_t position = static_cast<size_t>(launch.positions[row]), j = position % kBlockPositions;
  const int block = launch.tables[static_cast<size_t>(launch.row_lane[row])][position / kBlockPositions];
  const uint8_t* layer =
      calbin.kv.base() + static_cast<size_t>(block) * calbin.kv.stride() + static_cast<size_t>(c.kv_layer) * s.layer_bytes();
  const KVPlaces at(s.type, s.kv_heads, s.head_dim);
  for (size_t head = 0; head < static_cast<size_t>(s.kv_heads); ++head) {
    plane(h, layer + at.k(head), at.kb, j / 16 * dim * 16 + j % 16, dim, 16);
    plane(h, layer + at.v(head), at.vb, j * dim, dim, 1);
    if (at.ks) plane(h, layer + at.k_scale(head), 4, j, 1, 1);
    if (at.vs) plane(h, layer + at.v_scale(head), 4, j, 1, 1);
  }
}

// Outputs of the chip's experts for the row, in the order of its choices; where a pair lies depends on other rows.
void chosen(Hash& h, const Call& c, const float* choice, const float* out) {
  const size_t width = static_cast<size_t>(c.out.width / c.top_k);
  for (int j = 0; j < c.top_k; ++j) {
    const int expert = static_cast<int>(choice[c.top_k + j]), place = static_cast<int>(choice[2 * c.top_k + j]);
    if (expert >= c.first && expert < c.first + c.experts) h.floats(out + static_cast<size_t>(place) * width, width);
  }
}

// Only rows whose logits were asked for.
void logits(Hash& h, const LaunchData& launch, int r, int vocab) {
  const Lane& lane = launch.lane[static_cast<size_t>(launch.row_lane[r])];
  const int first = lane.cur - lane.logit_rows(), i = r - lane.first_row;
  if (lane.logits && i >= first) h.floats(lane.logits.get() + static_cast<size_t>(i - first) * static_cast<size_t>(vocab), static_cast<size_t>(vocab));
}

// What a text gives back, on its first row.
void text(Hash& h, const LaunchData& launch, int r, const float* values, int n) {
  if (r == launch.lane[static_cast<size_t>(launch.row_lane[r])].first_row) h.floats(values, static_cast<size_t>(n));
}

}  // namespace

void open_prints(const Calbin& calbin, LaunchData& launch) {
  launch.prints.resize(static_cast<size_t>(calbin.chips()));
  for (int i = 0; i < calbin.chips(); ++i) {
    const auto& calls = calbin.chip(i).programs[static_cast<size_t>(launch.program->index)]->calls;
    launch.prints[static_cast<size_t>(i)].assign(calls.size() * static_cast<size_t>(launch.rows), 0);
  }
}

void Executor::print(const Calbin& calbin, size_t index, LaunchData& launch) const {
  const Call& c = calbin.programs[static_cast<size_t>(launch.program->index)]->calls[index];
  if (c.op == Op::qk_norm_rope_kv && c.partner != nullptr && ropes_by_head(*c.partner, launch)) return;  // its attention does its work
  if (c.op == Op::attention && c.partner != nullptr && ropes_by_head(c, launch)) print_rows(calbin, *c.partner, index - 1, launch);
  print_rows(calbin, c, index, launch);
}

void Executor::print_rows(const Calbin& calbin, const Call& c, size_t index, LaunchData& launch) const {
  uint64_t* to = launch.prints[static_cast<size_t>(chip_)].data() + index * static_cast<size_t>(launch.rows);
  const auto lane = [&](int r) -> const Lane& { return launch.lane[static_cast<size_t>(launch.row_lane[r])]; };
  for (int r = 0; r < launch.rows; ++r) {
    const auto row = [&](const Buf& b) { return at(calbin, b) + static_cast<size_t>(r) * static_cast<size_t>(b.width); };
    Hash h;
    switch (c.op) {
      case Op::qk_norm_rope_kv: roped(h, calbin, c, launch, r, row(c.x)); break;
      case Op::moe_route: h.floats(row(c.out), 2 * static_cast<size_t>(c.top_k)); break;
      case Op::moe_experts: chosen(h, c, row(c.table), at(calbin, c.out)); break;
      case Op::lm_head: if (chip_ == 0) logits(h, launch, r, calbin.vocab); break;
      case Op::pool: text(h, launch, r, lane(r).embedding, c.x.width); break;
      case Op::classify: text(h, launch, r, lane(r).scores, c.down.n); break;
      default: h.floats(row(c.out), static_cast<size_t>(c.out.width));
    }
    to[r] = h.value();
  }
}

}  // namespace calstack
