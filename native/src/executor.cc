#include "calstack/executor.h"

#include <time.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "executor_scratch.h"
#include "packed.h"

namespace calstack {
namespace {

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

constexpr size_t kNextBytes = 98304;   // of the next weight at most, while a thread waits: it lies in L2 when the call begins
constexpr int kCallsTogether = 64;     // then an abort is looked for
constexpr int kRowsTogether = 512;     // rows times calls, at most, for the same reason

// Activation bytes of a row chunk that stay in a core's L2 beside the weights that stream through it.
constexpr size_t kChunkBytes = 512 << 10;

constexpr int kOwnRows = 64;  // a thread's rows from which on threads share rows rather than columns out: then what one quantises it reads

int row_chunk(size_t row_bytes, int rows, int threads) {
  const int most = static_cast<int>(std::max<size_t>(kChunkBytes / row_bytes, 16)) / 16 * 16;
  int chunks = (rows + most - 1) / most;
  if (rows >= kOwnRows * threads) chunks = (chunks + threads - 1) / threads * threads;
  return ((rows + chunks - 1) / chunks + 15) / 16 * 16;
}

// A linear call cut into (row chunk, column unit) tiles; a unit is one packed block, or a gate/up pair.
struct Tiling {
  int rows, chunk, blocks, step, units;

  Tiling(const Call& c, int rows_, int chunk_)
      : rows(rows_), chunk(chunk_), blocks((c.weight.n + kLane - 1) / kLane), step(c.epilogue == Epilogue::gated ? 2 : 1) {
    units = blocks / step;
  }
  int count() const { return (rows + chunk - 1) / chunk * units; }

  // f(first row, rows, first block, end block) for each row chunk that tiles [begin, end) touch.
  template <class F>
  void each(int begin, int end, F&& f) const {
    while (begin < end) {
      const int c = begin / units, stop = std::min(end, (c + 1) * units), r0 = c * chunk;
      f(r0, std::min(chunk, rows - r0), (begin - c * units) * step, (stop - c * units) * step);
      begin = stop;
    }
  }
};

// Calls whose parts threads run side by side without a word from the caller.
bool shared_out(Op op) {
  return op != Op::lm_head && op != Op::all_gather && op != Op::moe_route && op != Op::moe_experts && op != Op::moe_combine && op != Op::classify;
}

bool reads_weight(const Call& c) {
  return c.op == Op::norm_linear || c.op == Op::linear || c.op == Op::lm_head || c.op == Op::moe_route || c.op == Op::classify;
}

// Every call learns which weight is read after it; behind the last one comes the first, of the next launch.
void link_calls(Program& p) {
  const auto first = std::find_if(p.calls.begin(), p.calls.end(), reads_weight);
  const Call* next = first == p.calls.end() ? nullptr : &*first;
  for (auto c = p.calls.rbegin(); c != p.calls.rend(); ++c) {
    c->next = next;
    if (reads_weight(*c)) next = &*c;
  }
  for (size_t i = 1; i < p.calls.size(); ++i) {
    Call &a = p.calls[i - 1], &b = p.calls[i];
    if (a.op != Op::qk_norm_rope_kv || b.op != Op::attention || a.x.offset != b.x.offset || a.kv_layer != b.kv_layer) continue;
    a.partner = &b;
    b.partner = &a;
  }
}

bool quantised(const Weight& w) { return w.format == WFmt::w4a8 || w.format == WFmt::w8a8; }

constexpr Chunking kLinearChunks{2};

// The weights that a thread begins a call with.
struct Slice {
  const uint8_t* begin;
  size_t bytes;
  Slice(const Call& c, const Member& team) {
    const Tiling tiles(c, 1, 1);
    const ThreadPool::Range own = team.range_of(tiles.units, kLinearChunks);
    const size_t unit = static_cast<size_t>(tiles.step) * block_bytes(c.weight);
    begin = c.weight.data + static_cast<size_t>(own.begin) * unit;
    bytes = static_cast<size_t>(own.end - own.begin) * unit;
  }
};

}  // namespace

// Start and duration of every call, from the launch's begin; without a launch nothing.
class CallClock {
 public:
  explicit CallClock(LaunchData* launch) : launch_(launch), begin_(launch != nullptr ? now_ns() : 0), last_(begin_) {}
  void ended(size_t call) {
    if (launch_ == nullptr) return;
    const int64_t t = now_ns();
    launch_->spans[call] = {last_ - begin_, t - last_, std::exchange(launch_->experts, 0)};
    last_ = t;
  }

 private:
  LaunchData* launch_;
  const int64_t begin_;
  int64_t last_;
};

const char* op_name(Op op) {
  static constexpr const char* names[] = {"embed", "rope_table", "norm_linear", "qk_norm_rope_kv", "attention", "linear", "lm_head", "all_gather",
                                          "moe_route", "moe_experts", "moe_combine", "norm_add", "layer_norm", "encoder_attention", "pool", "classify"};
  return names[static_cast<int>(op)];
}

Calbin::Calbin(const std::string& path, const KVShape& shape, int vocab_) : params(path), kv(shape), vocab(vocab_) {}

size_t Calbin::block_bytes() const {
  size_t sum = 0;
  for (int i = 0; i < chips(); ++i) sum += chip(i).kv.block_bytes();
  return sum;
}

Executor::Executor(const KernelTable& kernels, ThreadPool& pool)
    : kernels_(kernels), pool_(pool), scratch_(std::make_unique<Scratch>(pool.threads())) {}

Executor::~Executor() = default;

size_t Executor::scratch_bytes() const { return scratch_->bytes(); }

void Executor::prepare(const Calbin& calbin) {
  Scratch& s = *scratch_;
  for (const auto& p : calbin.programs) {
    link_calls(*p);
    for (const Call& c : p->calls) {
      const int rows = c.op == Op::lm_head || c.op == Op::classify ? kHeadRows : p->rows;
      const size_t elements = static_cast<size_t>(rows) * static_cast<size_t>(c.weight.k);
      if (reads_weight(c)) {
        const size_t inner = c.op == Op::classify ? static_cast<size_t>(c.down.k) : 0;
        s.grow_quant(std::max(elements, kHeadRows * inner));
        s.grow_few(std::max(static_cast<size_t>(c.weight.k), inner));
        if (!quantised(c.weight)) grow(s.normed, elements * sizeof(float));
      }
      if (c.op == Op::moe_route) s.grow_moe(p->rows, c.top_k, c.weight.n);
      if (c.op == Op::moe_experts) {
        const size_t pairs = static_cast<size_t>(p->rows) * static_cast<size_t>(c.top_k), widest = static_cast<size_t>(std::max(c.weight.k, c.down.k));
        s.grow_experts(p->rows, c.top_k, c.experts, c.down.k);
        s.grow_quant(pairs * widest);
        s.grow_few(kFewPairs);
        if (!quantised(c.weight) || !quantised(c.down)) grow(s.normed, pairs * widest * sizeof(float));
      }
      if (c.op == Op::embed && c.add)
        for (auto& w : s.worker) grow(w.row, static_cast<size_t>(c.weight.k) * sizeof(float));
      if (c.op == Op::encoder_attention) s.grow_texts(p->lanes, p->rows);
      if (c.op == Op::classify) s.grow_classifier(c.weight.k, c.weight.n, c.down.n);
      if (c.op == Op::attention || c.op == Op::encoder_attention) s.grow_attention(c.attn, p->lanes, p->rows, (p->context + kSplitKeys - 1) / kSplitKeys);
      if (c.op == Op::lm_head) s.grow_head(c.x.width, calbin.vocab, p->lanes);
    }
  }
}

bool Executor::run(const Calbin& calbin, LaunchData& launch, const std::atomic<bool>& abort, ChipLink* link, int chip) {
  link_ = link;
  abort_ = &abort;
  chip_ = chip;
  halted_ = false;
  lanes_apart_ = lanes_apart(launch);
  const auto& calls = calbin.programs[static_cast<size_t>(launch.program->index)]->calls;
  if (calbin.embedding + calbin.labels > 0) place_texts(calbin, launch);
  CallClock clock(launch.profile && chip == 0 ? &launch : nullptr);
  const size_t most = static_cast<size_t>(std::clamp(kRowsTogether / std::max(launch.rows, 1), 1, kCallsTogether));
  for (size_t i = 0; i < calls.size();) {
    if (abort.load(std::memory_order_relaxed)) return false;
    size_t end = i;
    while (end < calls.size() && end - i < most && shared_out(calls[end].op)) ++end;
    if (end > i) {
      run_together(calbin, launch, i, end, &clock);
      i = end;
      continue;
    }
    call(calbin, calls[i], launch);
    if (halted_) return false;
    clock.ended(i++);
  }
  return true;
}

void Executor::run_together(const Calbin& calbin, LaunchData& launch, size_t begin, size_t end, CallClock* clock) {
  const Call* calls = calbin.programs[static_cast<size_t>(launch.program->index)]->calls.data();
  const auto begun = std::exchange(launch.begun, nullptr);
  pool_.together([&](Member& team) {
    if (begun && team.index() == pool_.threads() - 1) begun();
    for (size_t i = begin; i < end; ++i) {
      look_ahead(team, calbin, calls + i + 1, calls + end, launch);
      part(team, calbin, calls[i], launch);
      if (team.index() == 0) clock->ended(i);
    }
  });
}

void Executor::call(const Calbin& calbin, const Call& c, LaunchData& launch) {
  switch (c.op) {
    case Op::lm_head: return lm_head(calbin, c, launch);
    case Op::moe_route: return moe_route(calbin, c, launch);
    case Op::moe_experts: return moe_experts(calbin, c, launch);
    case Op::moe_combine: return moe_combine(calbin, c, launch);
    case Op::all_gather: return all_gather(calbin, c, launch);
    case Op::classify: return classify(calbin, c, launch);
    case Op::layer_norm:
    case Op::encoder_attention:
    case Op::pool:
    case Op::embed:
    case Op::rope_table:
    case Op::qk_norm_rope_kv:
    case Op::attention:
    case Op::norm_add:
    case Op::norm_linear:
    case Op::linear: return;  // see `part`
  }
}

void Executor::part(Member& team, const Calbin& calbin, const Call& c, const LaunchData& launch) {
  const auto stride = [](const Buf& b) { return static_cast<size_t>(b.width); };
  switch (c.op) {
    case Op::embed: return embed(team, calbin, c, launch);
    case Op::rope_table: return rope_table(team, calbin, c, launch);
    case Op::qk_norm_rope_kv: return rope_kv(team, calbin, c, launch);
    case Op::attention: return attention(team, calbin, c, launch);
    case Op::norm_add: return norm_add(team, calbin, c, launch);
    case Op::layer_norm: return layer_norm(team, calbin, c, launch);
    case Op::encoder_attention: return encoder_attention(team, calbin, c, launch);
    case Op::pool: return pool(team, calbin, c, launch);
    case Op::norm_linear:
    case Op::linear: return linear(team, c, at(calbin, c.x), stride(c.x), launch.rows, at(calbin, c.out), stride(c.out));
    case Op::classify:
    case Op::lm_head:
    case Op::moe_route:
    case Op::moe_experts:
    case Op::moe_combine:
    case Op::all_gather: return;  // see `call`
  }
}

// What the thread reads after the call before `c`, while it waits for the others at that call's end.
void Executor::look_ahead(Member& team, const Calbin& calbin, const Call* c, const Call* end, const LaunchData& launch) const {
  team.ahead.clear();
  if (launch.rows > kFewRows) return;
  for (; c < end; ++c) {
    if (c->op == Op::attention) touch_keys(team, calbin, *c, launch, team.ahead);
    if (!reads_weight(*c)) continue;
    const Slice s(*c, team);
    return team.ahead.add(s.begin, std::min(s.bytes, kNextBytes));
  }
}

void Executor::embed(Member& team, const Calbin& calbin, const Call& c, const LaunchData& launch) {
  float* out = at(calbin, c.out);
  const size_t os = static_cast<size_t>(c.out.width);
  const int32_t* ids = c.index == Index::ids ? launch.tokens : c.index == Index::types ? launch.types : launch.positions;
  if (c.add) return embed_add(team, c, ids, out, launch.rows);
  team.run(launch.rows, {8}, [&](int b, int e, int) { kernels_.embed_rows(c.weight, ids, c.scale, out, os, b, e); });
}

void Executor::rope_table(Member& team, const Calbin& calbin, const Call& c, const LaunchData& launch) {
  float* out = at(calbin, c.out);
  const size_t os = static_cast<size_t>(c.out.width);
  team.run(launch.rows, {8}, [&](int b, int e, int) {
    kernels_.rope_table(c.inv_freq, c.out.width / 2, c.attention_factor, launch.positions, out, os, b, e);
  });
}

void Executor::norm_add(Member& team, const Calbin& calbin, const Call& c, const LaunchData& launch) {
  float *y = at(calbin, c.x), *x = at(calbin, c.out);
  const size_t n = static_cast<size_t>(c.x.width);
  team.run(launch.rows, {4, 32}, [&](int b, int e, int) {
    kernels_.norm_rows(y, n, c.norm, y, n, c.x.width, b, e);
    for (size_t i = static_cast<size_t>(b) * n; i < static_cast<size_t>(e) * n; ++i) x[i] += y[i];
  });
}

void Executor::linear(const Call& c, const float* x, size_t xs, int rows, float* out, size_t os) {
  pool_.together([&](Member& team) { linear(team, c, x, xs, rows, out, os); });
}

void Executor::linear(Member& team, const Call& c, const float* x, size_t xs, int rows, float* out, size_t os) {
  if (!quantised(c.weight)) return linear_float(team, c, x, xs, rows, out, os);
  if (rows == 1 || rows * c.weight.k <= kFewElements) return linear_few(team, c, x, xs, rows, out, os);
  linear_quantised(team, c, x, xs, rows, out, os);
}

// Each thread quantises the few rows for itself on its first chunk: one phase instead of two.
void Executor::linear_few(Member& team, const Call& c, const float* x, size_t xs, int rows, float* out, size_t os) {
  const Tiling tiles(c, rows, rows);
  const QuantRows q = scratch_->few(team.index(), c.weight.k, c.weight.group);
  bool ready = false;
  const ThreadPool::Range own = team.range_of(tiles.units, kLinearChunks);
  const uint8_t* next = Slice(*c.next, team).begin;
  Weight w = c.weight;
  team.run(tiles.units, kLinearChunks, [&](int b, int e, int) {
    if (!ready) kernels_.quant_rows(x, xs, c.norm, q, 0, rows);
    ready = true;
    const bool stolen = b < own.begin || b >= own.end;
    w.after = stolen ? nullptr : e == own.end ? next : w.data + static_cast<size_t>(e * tiles.step) * block_bytes(w);
    kernels_.linear_q(w, q, rows, c.bias, c.epilogue, c.act, out, os, b * tiles.step, e * tiles.step);
  });
}

void Executor::linear_quantised(Member& team, const Call& c, const float* x, size_t xs, int rows, float* out, size_t os) {
  const QuantRows q = scratch_->shared(c.weight.k, c.weight.group);
  team.run(rows, {4, 32}, [&](int b, int e, int) { kernels_.quant_rows(x, xs, c.norm, q, b, e); });
  const size_t row_bytes = static_cast<size_t>(q.k + 12 * (q.k / q.group));
  const Tiling tiles(c, rows, row_chunk(row_bytes, rows, pool_.threads()));
  team.run(tiles.count(), kLinearChunks, [&](int b, int e, int) {
    tiles.each(b, e, [&](int r0, int n, int nb0, int nb1) {
      kernels_.linear_q(c.weight, advance(q, r0), n, c.bias, c.epilogue, c.act, out + static_cast<size_t>(r0) * os, os, nb0, nb1);
    });
  });
}

void Executor::linear_float(Member& team, const Call& c, const float* x, size_t xs, int rows, float* out, size_t os) {
  if (c.norm.weight != nullptr) {
    float* y = scratch_->normed.as<float>();
    const size_t ys = static_cast<size_t>(c.weight.k);
    team.run(rows, {4, 32}, [&, from = x, from_stride = xs](int b, int e, int) {
      kernels_.norm_rows(from, from_stride, c.norm, y, ys, c.weight.k, b, e);
    });
    x = y;
    xs = ys;
  }
  const Tiling tiles(c, rows, row_chunk(static_cast<size_t>(c.weight.k) * sizeof(float), rows, pool_.threads()));
  team.run(tiles.count(), kLinearChunks, [&](int b, int e, int) {
    tiles.each(b, e, [&](int r0, int n, int nb0, int nb1) {
      const size_t r = static_cast<size_t>(r0);
      kernels_.linear_f(c.weight, x + r * xs, xs, n, c.bias, c.epilogue, c.act, out + r * os, os, nb0, nb1);
    });
  });
}

}  // namespace calstack
