// What a call must move and compute: the numbers a profile sets beside its times.
#include <algorithm>

#include "calstack/executor.h"

namespace calstack {
namespace {

int64_t head_rows(const LaunchData& launch) {
  int64_t rows = 0;
  for (int i = 0; i < launch.lanes; ++i) {
    const Lane& lane = launch.lane[static_cast<size_t>(i)];
    rows += lane.cur > 0 ? std::max(lane.emit, lane.logit_rows()) : 0;
  }
  return rows;
}

CallWork linear_work(const Call& c, int64_t rows) {
  if (rows == 0) return {};
  const int64_t n = c.weight.n, k = c.weight.k;
  return {static_cast<int64_t>(c.weight_bytes) + rows * 4 * (k + n), 2 * n * k * rows};
}

CallWork attention_work(const Call& c, const LaunchData& launch, const KVShape& kv) {
  int64_t read = 0, pairs = 0;
  for (int i = 0; i < launch.lanes; ++i) {
    const Lane& lane = launch.lane[static_cast<size_t>(i)];
    const int64_t end = lane.past + lane.cur, window = c.attn.window > 0 ? c.attn.window : end;
    read += lane.cur > 0 ? std::min(end, window + lane.cur - 1) : 0;
    for (int64_t p = lane.past; p < end; ++p) pairs += std::min(p + 1, window);
  }
  const int64_t position = static_cast<int64_t>(kv.layer_bytes() / kBlockPositions);
  const int64_t io = int64_t{launch.rows} * 8 * c.attn.heads * c.attn.head_dim;
  return {read * position + io, 4 * pairs * c.attn.heads * c.attn.head_dim};
}

CallWork encoder_work(const Call& c, const LaunchData& launch) {
  int64_t pairs = 0;
  for (int i = 0; i < launch.lanes; ++i) {
    const int64_t n = launch.lane[static_cast<size_t>(i)].cur;
    pairs += n * n;
  }
  const int64_t width = int64_t{c.attn.heads} * c.attn.head_dim;
  return {int64_t{launch.rows} * 4 * (c.x.width + c.table.width + width), 4 * pairs * width};
}

CallWork experts_work(const Call& c, const CallSpan& span, int64_t rows) {
  const int64_t pairs = rows * c.top_k * c.experts / (c.starts.empty() ? c.experts : c.starts.back());  // of several chips an even share
  const int64_t inner = c.down.k, hidden = c.weight.k;
  const int64_t weights = static_cast<int64_t>(c.weight_bytes) / c.experts * span.experts;
  return {weights + pairs * 8 * (inner + hidden), pairs * 6 * inner * hidden};
}

}  // namespace

CallWork call_work(const Call& c, const CallSpan& span, const LaunchData& launch, const KVShape& kv) {
  const int64_t rows = launch.rows;
  switch (c.op) {
    case Op::embed: return {rows * (static_cast<int64_t>(c.weight_bytes) / std::max(c.weight.n, 1) + 4 * c.out.width), rows * c.out.width};
    case Op::rope_table: return {rows * 4 * c.out.width, rows * 20 * c.out.width};
    case Op::qk_norm_rope_kv: return {rows * 8 * c.x.width, rows * 6 * c.x.width};
    case Op::attention: return attention_work(c, launch, kv);
    case Op::norm_linear:
    case Op::linear: return linear_work(c, rows);
    case Op::norm_add: return {rows * 12 * c.x.width, rows * 5 * c.x.width};
    case Op::moe_route: return linear_work(c, rows);
    case Op::moe_experts: return experts_work(c, span, rows);
    case Op::moe_combine: return {rows * 4 * c.out.width * (c.top_k + 2), rows * 2 * c.top_k * c.out.width};
    case Op::all_gather: return {rows * 8 * c.out.width, c.add ? rows * c.out.width : 0};
    case Op::lm_head: return linear_work(c, head_rows(launch));
    case Op::layer_norm: return {rows * 8 * c.x.width, rows * 8 * c.x.width};
    case Op::encoder_attention: return encoder_work(c, launch);
    case Op::pool: return {rows * 4 * c.x.width, rows * c.x.width};
    case Op::classify: return linear_work(c, launch.lanes);
  }
  return {};
}

}  // namespace calstack
