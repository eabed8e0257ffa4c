// A whole decode step on the executor, over random weights of a model's shape: microseconds by call, and the share of the read limit
// measured in the same run over as many bytes. No host, no queue: what the kernels and the phases between them cost.
//   decode_bench [--layers N] [--hidden N] [--ff N] [--heads N] [--kv-heads N] [--vocab N] [--depth N] [--threads N] [--isa NAME]
// With six layers and --vocab 16 the weights lie in the last-level cache, where phases and cold starts weigh most.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "calstack/ceilings.h"
#include "calstack/executor.h"
#include "packed.h"

namespace {

using namespace calstack;

struct Options {
  std::map<std::string, int> n{{"layers", 30}, {"hidden", 576}, {"ff", 1536}, {"heads", 9}, {"kv-heads", 3}, {"vocab", 49152}, {"depth", 64},
                               {"threads", static_cast<int>(std::thread::hardware_concurrency())}, {"steps", 64}, {"rounds", 7}};
  std::string isa;
  int at(const char* name) const { return n.at(name); }
};

Options parse(int argc, char** argv) {
  Options o;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string key = std::string(argv[i]).substr(std::min<size_t>(2, std::strlen(argv[i])));
    if (key == "isa") o.isa = argv[i + 1];
    else if (o.n.count(key) != 0) o.n[key] = std::max(1, std::atoi(argv[i + 1]));
    else std::fprintf(stderr, "decode_bench: no option %s\n", argv[i]), std::exit(2);
  }
  return o;
}

constexpr int kHeadDim = 64, kGroup = 32;

// Weights, buffers and calls of a llama shape.
class Model {
 public:
  Model(const Options& o, int context)
      : calbin_("/proc/self/exe", KVShape{KVType::bf16, o.at("layers"), o.at("kv-heads"), kHeadDim, (context + kBlockPositions - 1) / kBlockPositions},
                o.at("vocab")),
        hidden_(o.at("hidden")), ff_(o.at("ff")), memory_(size_of(o), Pages::huge), vectors_(static_cast<size_t>(8 * std::max(ff_, hidden_)), 1.0f) {
    calbin_.programs.push_back(std::make_unique<Program>());
    program_ = calbin_.programs.back().get();
    program_->rows = program_->lanes = 1;
    program_->context = context;
    qkv_ = (o.at("heads") + 2 * o.at("kv-heads")) * kHeadDim;
    const Buf x = buffer(hidden_), qkv = buffer(qkv_), y = buffer(o.at("heads") * kHeadDim), h = buffer(ff_), table = buffer(kHeadDim);
    const Weight head = weight(WFmt::w8a8, false, (o.at("vocab") + 15) / 16 * 16, hidden_);
    Call& embed = add(Op::embed, -1, Buf{}, x);
    embed.weight = head;
    Call& rope = add(Op::rope_table, -1, Buf{}, table);
    rope.inv_freq = vectors_.data();
    for (int layer = 0; layer < o.at("layers"); ++layer) {
      linear(Op::norm_linear, layer, x, weight(WFmt::w4a8, true, qkv_, hidden_), Epilogue::store, qkv);
      for (const Op op : {Op::qk_norm_rope_kv, Op::attention}) {
        Call& c = add(op, layer, qkv, y);
        c.attn = {o.at("heads"), o.at("kv-heads"), kHeadDim, 0, 0.125f, 0.0f};
        c.kv_layer = layer;
        c.rope_dim = kHeadDim;
        c.table = table;
      }
      linear(Op::linear, layer, y, weight(WFmt::w4a8, true, hidden_, o.at("heads") * kHeadDim), Epilogue::residual, x);
      linear(Op::norm_linear, layer, x, weight(WFmt::w4a8, true, 2 * ff_, hidden_), Epilogue::gated, h);
      linear(Op::linear, layer, h, weight(WFmt::w4a8, true, hidden_, ff_), Epilogue::residual, x);
    }
    linear(Op::lm_head, -1, x, head, Epilogue::store, Buf{});
    program_->arena_bytes = arena_;
    calbin_.arena = Region(arena_);
    for (int b = 0; b < calbin_.kv.shape().blocks; ++b) calbin_.kv.touch(b), std::memset(calbin_.kv.base() + static_cast<size_t>(b) * calbin_.kv.stride(), 0, calbin_.kv.stride());
  }
  Calbin& calbin() { return calbin_; }
  Program& program() { return *program_; }
  size_t bytes() const { return used_; }

 private:
  static size_t size_of(const Options& o) {
    const size_t hidden = static_cast<size_t>(o.at("hidden")), heads = static_cast<size_t>(o.at("heads") * kHeadDim), kv = static_cast<size_t>(o.at("kv-heads") * kHeadDim);
    const size_t layer = hidden * (2 * heads + 2 * kv + 3 * static_cast<size_t>(o.at("ff")));
    return layer * static_cast<size_t>(o.at("layers")) * 5 / 8 + hidden * static_cast<size_t>(o.at("vocab") + 16) * 17 / 16 + (1 << 20);
  }
  Buf buffer(int width) {
    const Buf b{arena_, width};
    arena_ += (static_cast<size_t>(width) * sizeof(float) + 63) / 64 * 64;
    return b;
  }
  Weight weight(WFmt format, bool minimum, int n, int k) {
    Weight w{memory_.data() + used_, format, n, k, kGroup, minimum};
    const size_t groups = static_cast<size_t>(n / kLane) * static_cast<size_t>(k / kGroup), codes = code_bytes(w);
    for (size_t g = 0; g < groups; ++g) {
      uint8_t* p = memory_.data() + used_ + g * group_bytes(w);
      for (size_t i = 0; i < codes; ++i) p[i] = static_cast<uint8_t>((seed_ = seed_ * 6364136223846793005u + 1442695040888963407u) >> 56);
      const uint16_t scale = 0x1c00, low = 0x9f80;
      for (size_t i = 0; i < kLane; ++i) {
        std::memcpy(p + codes + 2 * i, &scale, 2);
        if (minimum) std::memcpy(p + codes + 2 * (i + kLane), &low, 2);
      }
    }
    used_ += groups * group_bytes(w);
    return w;
  }
  Call& add(Op op, int layer, const Buf& x, const Buf& out) {
    program_->calls.emplace_back();
    Call& c = program_->calls.back();
    c.op = op;
    c.layer = layer;
    c.x = x;
    c.out = out;
    return c;
  }
  void linear(Op op, int layer, const Buf& x, const Weight& w, Epilogue ep, const Buf& out) {
    Call& c = add(op, layer, x, out);
    c.weight = w;
    c.weight_bytes = static_cast<size_t>(w.n / kLane) * block_bytes(w);
    c.epilogue = ep;
    if (op != Op::linear) c.norm = {vectors_.data(), 1e-5f};
  }

  Calbin calbin_;
  Program* program_ = nullptr;
  int hidden_, ff_, qkv_ = 0;
  Region memory_;
  std::vector<float> vectors_;
  size_t used_ = 0, arena_ = 0;
  uint64_t seed_ = 1;
};

struct Steps {
  std::vector<int32_t> table;
  int32_t token = 1, lane = 0, position = 0;
  LaunchData data;
  Steps(Model& m, int depth) : table(static_cast<size_t>(m.calbin().kv.shape().blocks)) {
    for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>(i);
    data.program = &m.program();
    data.lanes = data.rows = 1;
    data.lane.resize(1);
    Lane& l = data.lane[0];
    l.past = position = depth;
    l.cur = 1;
    l.emit = true;
    l.sampling = SampleArgs{};
    l.sampling.top_p = 1.0f;
    l.sampling.repetition = 1.0f;
    l.sampling.top_logprobs = -1;
    data.tables = {table.data()};
    data.tokens = &token;
    data.row_lane = &lane;
    data.positions = &position;
    data.spans.resize(m.program().calls.size());
  }
};

std::string kind(const Call& c) {
  if (c.weight.n == 0 || c.op == Op::embed) return op_name(c.op);
  return std::string(op_name(c.op)) + " " + std::to_string(c.weight.n) + "x" + std::to_string(c.weight.k);
}

}  // namespace

int main(int argc, char** argv) {
  const Options o = parse(argc, argv);
  const KernelTable* t = kernels_by_name(o.isa.c_str());
  if (!t) return std::fprintf(stderr, "decode_bench: no instruction set '%s' here\n", o.isa.c_str()), 2;
  const int threads = o.at("threads"), steps = o.at("steps");
  Model model(o, o.at("depth") + 1);
  ThreadPool pool(threads);
  Executor executor(*t, pool);
  executor.prepare(model.calbin());
  Steps s(model, o.at("depth"));
  const std::atomic<bool> abort{false};
  const auto& calls = model.program().calls;
  const size_t kv = static_cast<size_t>(o.at("depth")) * model.calbin().kv.block_bytes() / kBlockPositions;
  const ReadCeiling ceiling(model.bytes() + kv);
  double read = ceiling.gbs(*t, threads);
  std::vector<double> us;
  for (int r = 0; r < o.at("rounds"); ++r) {
    for (int i = 0; i < steps; ++i) {
      const auto begin = std::chrono::steady_clock::now();
      executor.run(model.calbin(), s.data, abort);
      us.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count());
    }
    read = std::max(read, ceiling.gbs(*t, threads));
  }
  std::sort(us.begin(), us.end());
  const double bytes = static_cast<double>(model.bytes() + kv), median = us[us.size() / 2];
  std::printf("%s, %d threads: %.1f MB a step, min %.0f p10 %.0f median %.0f us = %.1f GB/s, %.1f%% of %.1f\n", t->name, threads, bytes / 1e6, us[0],
              us[us.size() / 10], median, bytes / median / 1e3, 100 * bytes / median / 1e3 / read, read);
  s.data.profile = true;
  std::map<std::string, std::vector<double>> by;
  for (int i = 0; i < 2 * steps; ++i) {
    executor.run(model.calbin(), s.data, abort);
    std::map<std::string, double> sums;
    for (size_t c = 0; c < calls.size(); ++c) sums[kind(calls[c])] += static_cast<double>(s.data.spans[c].ns) / 1e3;
    for (const auto& [name, sum] : sums) by[name].push_back(sum);
  }
  for (auto& [name, v] : by) {
    std::sort(v.begin(), v.end());
    double moved = 0;
    int count = 0;
    for (size_t i = 0; i < calls.size(); ++i)
      if (kind(calls[i]) == name) moved += static_cast<double>(call_work(calls[i], s.data.spans[i], s.data, model.calbin().kv.shape()).bytes), ++count;
    std::printf("  %-24s %4d calls %8.1f us %7.2f a call %7.1f GB/s\n", name.c_str(), count, v[v.size() / 2], v[v.size() / 2] / count, moved / v[v.size() / 2] / 1e3);
  }
}
