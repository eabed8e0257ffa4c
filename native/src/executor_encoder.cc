// Calls that only encoders have. A text is a lane; its keys and values live in the launch, from the first block that is the lane's own.
#include <cstring>

#include "calstack/executor.h"
#include "executor_scratch.h"

namespace calstack {

void Executor::place_texts(const Calbin& calbin, LaunchData& launch) {
  Scratch& s = *scratch_;
  int block = 0;
  for (int i = 0; i < launch.lanes; ++i) {
    const Lane& lane = launch.lane[static_cast<size_t>(i)];
    s.text_tables[static_cast<size_t>(i)] = s.text_blocks.data() + block;
    block += (lane.cur + kBlockPositions - 1) / kBlockPositions;
    for (int r = 0; r < lane.cur; ++r) s.text_ends[static_cast<size_t>(lane.first_row + r)] = lane.cur - 1;
  }
  launch.d2h_bytes += static_cast<size_t>(launch.lanes) * static_cast<size_t>(calbin.embedding + calbin.labels) * sizeof(float);
}

void Executor::embed_add(Member& team, const Call& c, const int32_t* ids, float* out, int rows) {
  const size_t n = static_cast<size_t>(c.out.width);
  team.run(rows, {8}, [&](int b, int e, int w) {
    float* row = scratch_->worker[static_cast<size_t>(w)].row.as<float>();
    for (int r = b; r < e; ++r) {
      kernels_.embed_rows(c.weight, ids + r, c.scale, row, n, 0, 1);
      float* to = out + static_cast<size_t>(r) * n;
      for (size_t i = 0; i < n; ++i) to[i] += row[i];
    }
  });
}

void Executor::layer_norm(Member& team, const Calbin& calbin, const Call& c, const LaunchData& launch) {
  const float* x = at(calbin, c.x);
  float* y = at(calbin, c.out);
  const size_t n = static_cast<size_t>(c.x.width);
  team.run(launch.rows, {4, 32}, [&](int b, int e, int) {
    kernels_.layer_norm_rows(x, n, c.norm.weight, c.bias, c.norm.eps, y, n, c.x.width, b, e);
  });
}

void Executor::encoder_attention(Member& team, const Calbin& calbin, const Call& c, const LaunchData& launch) {
  const KVShape shape{KVType::f32, 1, c.attn.kv_heads, c.attn.head_dim, 0};
  const KVView kv{KVType::f32, reinterpret_cast<uint8_t*>(at(calbin, c.table)), shape.layer_bytes(), 0, c.attn.kv_heads, c.attn.head_dim,
                  scratch_->text_tables.data()};
  float* qkv = at(calbin, c.x);
  const size_t xs = static_cast<size_t>(c.x.width);
  team.run(launch.rows, {4, 16}, [&](int b, int e, int) {
    kernels_.qk_norm_rope_kv(qkv, xs, nullptr, 0, 0, nullptr, nullptr, 0.0f, c.attn, kv, launch.row_lane, launch.positions, b, e, 0,
                             c.attn.kv_heads);
  });
  attention_rows(team, calbin, c, launch, kv, scratch_->text_ends.data());
}

void Executor::pool(Member& team, const Calbin& calbin, const Call& c, const LaunchData& launch) {
  const float* x = at(calbin, c.x);
  const size_t n = static_cast<size_t>(c.x.width);
  team.run(launch.lanes, {1, 1}, [&](int b, int e, int) {
    for (int i = b; i < e; ++i) {
      const Lane& lane = launch.lane[static_cast<size_t>(i)];
      if (lane.cur > 0)
        kernels_.pool_rows(x + static_cast<size_t>(lane.first_row) * n, n, lane.cur, c.x.width, c.pooling, c.normalise, lane.embedding);
    }
  });
}

void Executor::classify(const Calbin& calbin, const Call& c, LaunchData& launch) {
  const size_t n = static_cast<size_t>(c.x.width);
  const float* x = at(calbin, c.x);
  float* to[kHeadRows];
  int count = 0;
  for (int i = 0; i < launch.lanes; ++i) {
    const Lane& lane = launch.lane[static_cast<size_t>(i)];
    if (lane.cur == 0) continue;
    std::memcpy(scratch_->head_x.as<float>() + static_cast<size_t>(count) * n, x + static_cast<size_t>(lane.first_row) * n, n * sizeof(float));
    to[count++] = lane.scores;
    if (count < kHeadRows) continue;
    classify_chunk(c, to, count);
    count = 0;
  }
  if (count > 0) classify_chunk(c, to, count);
}

// The first rows of `count` texts are gathered.
void Executor::classify_chunk(const Call& c, float* const* to, int count) {
  Call second = c;
  second.weight = c.down;
  second.bias = c.down_bias;
  second.epilogue = Epilogue::store;
  const size_t inner = static_cast<size_t>(c.weight.n), labels = static_cast<size_t>(c.down.n);
  float *h = scratch_->hidden.as<float>(), *z = scratch_->logits.as<float>();
  linear(c, scratch_->head_x.as<float>(), static_cast<size_t>(c.x.width), count, h, inner);
  linear(second, h, inner, count, z, labels);
  for (int i = 0; i < count; ++i) std::memcpy(to[i], z + static_cast<size_t>(i) * labels, labels * sizeof(float));
}

}  // namespace calstack
