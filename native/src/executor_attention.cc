// Rope, KV write and attention of a launch: how its lanes are cut into items.
#include <algorithm>

#include "attention_scratch.h"
#include "calstack/executor.h"
#include "executor_scratch.h"
#include "kv_layout.h"

namespace calstack {
namespace {

// Prefill rows of one item: its query vectors are one batch of the kernel, which reads the keys once per batch.
int row_block(const AttnShape& s) { return std::max(1, kAttentionBatch * s.kv_heads / s.heads); }

KVView view(const Calbin& calbin, const Call& c, const LaunchData& launch) {
  const KVShape& s = calbin.kv.shape();
  return {s.type, calbin.kv.base(), calbin.kv.stride(), static_cast<size_t>(c.kv_layer) * s.layer_bytes(), s.kv_heads, s.head_dim,
          launch.tables.data()};
}

int first_seen(const Call& c, int position) { return c.attn.window > 0 ? std::max(0, position - c.attn.window + 1) : 0; }
int first_split(const Call& c, int position) { return first_seen(c, position) / kSplitKeys; }

constexpr Chunking kItems{1, 1};

// Decode over long contexts with too few (lane, kv head) items to keep every thread busy.
bool wants_splits(const Call& c, const LaunchData& launch, int threads) {
  int deepest = 0;
  for (int i = 0; i < launch.lanes; ++i) {
    const Lane& lane = launch.lane[static_cast<size_t>(i)];
    if (lane.cur > 1) return false;
    deepest = std::max(deepest, lane.past);
  }
  return threads > 1 && deepest >= kSplitKeys && launch.rows * c.attn.kv_heads < 4 * threads;
}

}  // namespace

// One row a lane, and none reads a block that another writes to, as lanes over one request's blocks do.
bool Executor::lanes_apart(const LaunchData& launch) {
  const auto block = [&](int table, const Lane& of) { return launch.tables[static_cast<size_t>(table)][of.past / kBlockPositions]; };
  for (int i = 0; i < launch.lanes; ++i) {
    const Lane& writes = launch.lane[static_cast<size_t>(i)];
    if (writes.cur > 1) return false;
    for (int j = 0; j < launch.lanes; ++j) {
      const Lane& reads = launch.lane[static_cast<size_t>(j)];
      const bool sees = i != j && writes.cur > 0 && reads.cur > 0 && reads.past / kBlockPositions >= writes.past / kBlockPositions;
      if (sees && block(j, writes) == block(i, writes)) return false;
    }
  }
  return true;
}

// The thread that attends with a head also ropes it and writes its keys and values, in one phase.
bool Executor::ropes_by_head(const Call& c, const LaunchData& launch) const {
  return lanes_apart_ && c.partner != nullptr && !wants_splits(c, launch, pool_.threads());
}

void Executor::rope_kv(Member& team, const Calbin& calbin, const Call& c, const LaunchData& launch) {
  if (c.partner != nullptr && ropes_by_head(*c.partner, launch)) return;
  team.run(launch.rows, {4, 16}, [&](int b, int e, int) { rope_heads(calbin, c, launch, b, e, 0, c.attn.kv_heads); });
}

void Executor::rope_heads(const Calbin& calbin, const Call& c, const LaunchData& launch, int r0, int r1, int h0, int h1) const {
  kernels_.qk_norm_rope_kv(at(calbin, c.x), static_cast<size_t>(c.x.width), at(calbin, c.table), static_cast<size_t>(c.table.width), c.rope_dim,
                           c.q_norm, c.k_norm, c.eps, c.attn, view(calbin, c, launch), launch.row_lane, launch.positions, r0, r1, h0, h1);
}

// The first keys and values that the thread takes: of one lane, side by side for its heads.
void Executor::touch_keys(const Member& team, const Calbin& calbin, const Call& c, const LaunchData& launch, Ahead& ahead) const {
  const int heads = c.attn.kv_heads;
  const ThreadPool::Range own = team.range_of(launch.lanes * heads, kItems);
  const Lane& lane = launch.lane[static_cast<size_t>(std::min(own.begin / heads, launch.lanes - 1))];
  if (own.begin >= own.end || lane.cur != 1 || wants_splits(c, launch, pool_.threads())) return;
  const KVView kv = view(calbin, c, launch);
  const KVPlaces places(kv.type, kv.kv_heads, kv.head_dim);
  const size_t from = static_cast<size_t>(own.begin % heads), to = std::min(static_cast<size_t>(heads), from + static_cast<size_t>(own.end - own.begin));
  for (int tile = first_seen(c, lane.past) / kKeyTile, most = tile + 2; tile < most && tile * kKeyTile < lane.past; ++tile) {
    const uint8_t* layer = kv.base + static_cast<size_t>(kv.tables[own.begin / heads][tile]) * kv.block_bytes + kv.layer_offset;
    ahead.add(layer + places.k(from), places.k(to) - places.k(from));
    ahead.add(layer + places.v(from), places.v(to) - places.v(from));
  }
}

void Executor::attention(Member& team, const Calbin& calbin, const Call& c, const LaunchData& launch) {
  if (wants_splits(c, launch, pool_.threads())) return attention_splits(team, calbin, c, launch);
  Ahead keys;
  touch_keys(team, calbin, c, launch, keys);
  keys.finish();
  attention_rows(team, calbin, c, launch, view(calbin, c, launch), launch.positions);
}

// `positions`, per row: the last key it sees.
void Executor::attention_rows(Member& team, const Calbin& calbin, const Call& c, const LaunchData& launch, const KVView& kv,
                              const int32_t* positions) {
  auto& items = scratch_->worker[static_cast<size_t>(team.index())].items;
  items.clear();
  const int block = row_block(c.attn);
  for (int i = 0; i < launch.lanes; ++i) {  // last rows first: they see the most keys
    const Lane& lane = launch.lane[static_cast<size_t>(i)];
    for (int b = (lane.cur - 1) / block; b >= 0 && lane.cur > 0; --b) {
      const int r0 = lane.first_row + b * block;
      items.push_back({i, r0, std::min(r0 + block, lane.first_row + lane.cur), 0});
    }
  }
  const float* qkv = at(calbin, c.x);
  float* out = at(calbin, c.out);
  const size_t xs = static_cast<size_t>(c.x.width), os = static_cast<size_t>(c.out.width);
  const int heads = c.attn.kv_heads;
  const bool ropes = ropes_by_head(c, launch);
  team.run(static_cast<int>(items.size()) * heads, kItems, [&](int b, int e, int w) {
    for (int u = b; u < e; ++u) {
      const AttentionItem& it = items[static_cast<size_t>(u / heads)];
      if (ropes) rope_heads(calbin, *c.partner, launch, it.r0, it.r1, u % heads, u % heads + 1);
      kernels_.attention(qkv, xs, c.attn, kv, it.lane, positions, u % heads, it.r0, it.r1, out, os,
                         scratch_->worker[static_cast<size_t>(w)].attention.data());
    }
  });
}

// One unit per (lane, split, kv head), those of a split taken together; then the merge per (lane, head). Partials: [lane][split][head].
void Executor::attention_splits(Member& team, const Calbin& calbin, const Call& c, const LaunchData& launch) {
  auto& items = scratch_->worker[static_cast<size_t>(team.index())].items;
  items.clear();
  const int most = (launch.program->context + kSplitKeys - 1) / kSplitKeys;
  for (int i = 0; i < launch.lanes; ++i) {
    const Lane& lane = launch.lane[static_cast<size_t>(i)];
    if (lane.cur == 0) continue;
    for (int s = first_split(c, lane.past); s <= lane.past / kSplitKeys; ++s) items.push_back({i, lane.first_row, lane.first_row + 1, s});
  }
  const KVView kv = view(calbin, c, launch);
  const float* qkv = at(calbin, c.x);
  float* out = at(calbin, c.out);
  const size_t xs = static_cast<size_t>(c.x.width), os = static_cast<size_t>(c.out.width);
  const int kv_heads = c.attn.kv_heads, heads = c.attn.heads;
  const auto part = [&](int row, int s) { return static_cast<size_t>(row * most + s) * static_cast<size_t>(heads); };
  float *ml = scratch_->partial_ml.as<float>(), *o = scratch_->partial_o.as<float>();
  const size_t dim = static_cast<size_t>(c.attn.head_dim);
  team.run(static_cast<int>(items.size()) * kv_heads, {1}, [&](int b, int e, int w) {
    for (int u = b, h1 = 0; u < e; u += h1 - u % kv_heads) {
      const AttentionItem& it = items[static_cast<size_t>(u / kv_heads)];
      h1 = std::min(kv_heads, u % kv_heads + e - u);
      const int position = launch.positions[it.r0];
      const size_t p = part(it.r0, it.split - first_split(c, position));
      kernels_.attention_split(qkv, xs, c.attn, kv, it.lane, position, u % kv_heads, h1, it.r0, it.split, ml + 2 * p, o + p * dim,
                               scratch_->worker[static_cast<size_t>(w)].attention.data());
    }
  });
  team.run(launch.rows * heads, {4}, [&](int b, int e, int) {
    for (int u = b, h1 = 0; u < e; u += h1 - u % heads) {
      const int row = u / heads, position = launch.positions[row];
      h1 = std::min(heads, u % heads + e - u);
      const size_t p = part(row, 0);
      kernels_.attention_merge(c.attn, ml + 2 * p, o + p * dim, position / kSplitKeys - first_split(c, position) + 1, u % heads, h1,
                               out + static_cast<size_t>(row) * os);
    }
  });
}

}  // namespace calstack
