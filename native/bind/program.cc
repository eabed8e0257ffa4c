// Builds a calbin's programs from Python, call by call: names become offsets and pointers, and every size is checked.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <optional>

#include "builder.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace calstack::bind {
namespace {

[[noreturn]] void refuse(const std::string& what) { throw nb::value_error(what.c_str()); }

template <size_t N>
int index_of(const std::array<const char*, N>& names, const std::string& name, const char* what) {
  for (size_t i = 0; i < N; ++i)
    if (name == names[i]) return static_cast<int>(i);
  refuse(std::string(what) + " " + name + " is not known");
}

constexpr std::array<const char*, 6> kFormats{"w4a8", "w8a8", "w4a16", "bf16", "f16", "f32"};
constexpr std::array<const char*, 3> kActs{"silu", "gelu_tanh", "gelu"};
constexpr std::array<const char*, 3> kIndices{"ids", "types", "positions"};
constexpr std::array<const char*, 2> kPoolings{"mean", "cls"};
constexpr int kMostChips = 16;
constexpr std::array<const char*, 4> kKVTypes{"f32", "bf16", "bf16_v8", "i8"};

}  // namespace

KVType kv_type(const std::string& name) { return static_cast<KVType>(index_of(kKVTypes, name, "KV dtype")); }

CalbinBuilder::CalbinBuilder(const std::string& params, int vocab, const KVShape& kv) : calbin_(std::make_unique<Calbin>(params, kv, vocab)) {}

std::unique_ptr<Calbin> CalbinBuilder::take() {
  if (!calbin_) refuse("the calbin was loaded before");
  check_gathers();
  return std::move(calbin_);
}

Calbin& CalbinBuilder::part() {
  if (!calbin_) refuse("the calbin was loaded before");
  return calbin_->chip(calbin_->chips() - 1);
}

void CalbinBuilder::chip(const std::string& params, int kv_heads) {
  if (!calbin_ || kv_heads <= 0 || calbin_->chips() >= kMostChips) refuse("no chip can be added");
  KVShape kv = calbin_->kv.shape();
  kv.kv_heads = kv_heads;
  calbin_->others.push_back(std::make_unique<Calbin>(params, kv, calbin_->vocab));
}

// Chips must meet at the same calls in the same order, and a part must lie in its chip's arena.
void CalbinBuilder::check_gathers() const {
  const auto gathers = [](const Program& p) {
    std::vector<const Call*> found;
    for (const Call& c : p.calls)
      if (c.op == Op::all_gather || c.op == Op::moe_combine || c.op == Op::lm_head) found.push_back(&c);
    return found;
  };
  for (size_t i = 0; i < calbin_->programs.size(); ++i) {
    const auto first = gathers(*calbin_->programs[i]);
    for (int chip = 0; chip < calbin_->chips(); ++chip) {
      const Calbin& own = calbin_->chip(chip);
      if (own.programs.size() != calbin_->programs.size()) refuse("chips have different numbers of programs");
      const auto calls = gathers(*own.programs[i]);
      if (calls.size() != first.size()) refuse("chips have different sync points");
      for (size_t k = 0; k < calls.size(); ++k) {
        if (calls[k]->op != first[k]->op || calls[k]->parts.size() != first[k]->parts.size()) refuse("chips have different sync points");
        if (calls[k]->op == Op::lm_head) continue;
        if (calls[k]->parts.size() != static_cast<size_t>(calbin_->chips())) refuse("a gather has not one part per chip");
        const Buf& b = calls[k]->parts[static_cast<size_t>(chip)];
        for (const Call* other : {first[k], calls[k]})
          if (other->parts[static_cast<size_t>(chip)].offset != b.offset || other->parts[static_cast<size_t>(chip)].width != b.width)
            refuse("chips name different parts of a gather");
        const size_t bytes = static_cast<size_t>(own.programs[i]->rows) * static_cast<size_t>(b.width) * sizeof(float);
        if (b.width < 0 || b.offset % 64 != 0 || b.offset > own.programs[i]->arena_bytes || bytes > own.programs[i]->arena_bytes - b.offset)
          refuse("a gathered part lies outside its chip's arena");
      }
    }
  }
}

int CalbinBuilder::program(int rows, int lanes, int context, size_t arena_bytes) {
  if (rows <= 0 || lanes <= 0 || context <= 0 || lanes > rows) refuse("rows, lanes and context must be positive, lanes at most rows");
  auto p = std::make_unique<Program>();
  p->rows = rows;
  p->lanes = lanes;
  p->context = context;
  p->arena_bytes = arena_bytes;
  auto& programs = part().programs;
  p->index = static_cast<int>(programs.size());
  programs.push_back(std::move(p));
  return programs.back()->index;
}

Program& CalbinBuilder::last() {
  if (part().programs.empty()) refuse("no program was begun");
  return *part().programs.back();
}

Call& CalbinBuilder::add(Op op, int layer) {
  last().calls.emplace_back();
  Call& c = last().calls.back();
  c.op = op;
  c.layer = layer;
  return c;
}

Buf CalbinBuilder::buf(const BufArg& b, int width) { return buf(b, width, last().rows); }

Buf CalbinBuilder::buf(const BufArg& b, int width, int rows) {
  const auto [offset, w] = b;
  const Program& p = last();
  const size_t bytes = static_cast<size_t>(rows) * static_cast<size_t>(w) * sizeof(float);
  if (w <= 0 || (width > 0 && w != width)) refuse("a buffer of width " + std::to_string(w) + " where " + std::to_string(width) + " is needed");
  if (offset % 64 != 0 || offset > p.arena_bytes || bytes > p.arena_bytes - offset) refuse("a buffer lies outside the arena");
  return {offset, w};
}

const uint8_t* CalbinBuilder::bytes(size_t offset, size_t needed, size_t there) {
  const MappedFile& f = part().params;
  if (offset % 64 != 0 || offset > f.size() || there > f.size() - offset || needed > there) refuse("a tensor has too few bytes");
  return f.data() + offset;
}

const float* CalbinBuilder::vector(const std::optional<VectorArg>& v, int n) {
  if (!v) return nullptr;
  const auto [offset, there, count] = *v;
  if (count != n) refuse("a vector of " + std::to_string(count) + " where " + std::to_string(n) + " are needed");
  return reinterpret_cast<const float*>(bytes(offset, static_cast<size_t>(n) * sizeof(float), there));
}

void CalbinBuilder::weight(Call& c, const WeightArg& w, int k) {
  const auto& [offset, there, format, n, wk, group, minimum] = w;
  const auto fmt = static_cast<WFmt>(index_of(kFormats, format, "weight format"));
  if (n <= 0 || wk <= 0 || (k > 0 && wk != k)) refuse("a weight with k = " + std::to_string(wk) + " where " + std::to_string(k) + " is needed");
  const size_t blocks = static_cast<size_t>((n + kLane - 1) / kLane), depth = static_cast<size_t>(wk);
  size_t needed = 0;
  if (fmt <= WFmt::w4a16) {
    if (group < 16 || group % 16 != 0 || wk % group != 0) refuse("k = " + std::to_string(wk) + " is not whole groups of " + std::to_string(group));
    const size_t g = static_cast<size_t>(group), codes = fmt == WFmt::w8a8 ? g * 16 : g * 8;
    needed = blocks * (depth / g) * (codes + 32 + (minimum ? 32 : 0));
  } else {
    needed = blocks * depth * kLane * (fmt == WFmt::f32 ? 4 : 2);
  }
  c.weight = {bytes(offset, needed, there), fmt, n, wk, group, minimum};
  c.weight_bytes = needed;
}

void CalbinBuilder::embed(int layer, const WeightArg& w, float scale, const BufArg& out, const std::string& index, bool add) {
  Call& c = this->add(Op::embed, layer);
  weight(c, w, 0);
  c.index = static_cast<Index>(index_of(kIndices, index, "index"));
  c.add = add;
  if (c.index == Index::ids && c.weight.n < calbin_->vocab) refuse("the embedding has fewer rows than the vocabulary");
  if (c.index == Index::positions && c.weight.n < last().context) refuse("the embedding has fewer rows than the context");
  if (c.index == Index::types) calbin_->types = calbin_->types == 0 ? c.weight.n : std::min(calbin_->types, c.weight.n);
  c.scale = scale;
  c.out = buf(out, c.weight.k);
}

void CalbinBuilder::rope_table(int layer, const VectorArg& inv_freq, double factor, const BufArg& out) {
  Call& c = add(Op::rope_table, layer);
  c.out = buf(out, 0);
  c.inv_freq = vector(inv_freq, c.out.width / 2);
  c.attention_factor = factor;
}

void CalbinBuilder::norm_linear(int layer, const BufArg& x, const VectorArg& norm, float eps, const WeightArg& w,
                                const std::optional<VectorArg>& bias, const std::optional<std::string>& gated, const BufArg& out) {
  Call& c = add(Op::norm_linear, layer);
  c.x = buf(x, 0);
  weight(c, w, c.x.width);
  c.norm = {vector(norm, c.x.width), eps};
  c.bias = vector(bias, c.weight.n);
  if (gated && c.weight.n % 32 != 0) refuse("a gated weight has whole pairs of 16 outputs");
  if (gated) c.act = static_cast<Act>(index_of(kActs, *gated, "activation"));
  c.epilogue = gated ? Epilogue::gated : Epilogue::store;
  c.out = buf(out, gated ? c.weight.n / 2 : c.weight.n);
}

void CalbinBuilder::linear(int layer, const BufArg& x, const WeightArg& w, const std::optional<VectorArg>& bias, bool residual,
                           const std::optional<std::string>& act, const BufArg& out) {
  Call& c = add(Op::linear, layer);
  c.x = buf(x, 0);
  weight(c, w, c.x.width);
  c.bias = vector(bias, c.weight.n);
  if (residual && act) refuse("a product is added or activated, not both");
  if (act) c.act = static_cast<Act>(index_of(kActs, *act, "activation"));
  c.epilogue = residual ? Epilogue::residual : act ? Epilogue::activated : Epilogue::store;
  c.out = buf(out, c.weight.n);
}

void CalbinBuilder::heads(Call& c, const HeadsArg& h, int kv_layer, const BufArg& qkv) {
  const auto [heads, kv_heads, head_dim] = h;
  const KVShape& kv = part().kv.shape();
  if (kv_heads != kv.kv_heads || head_dim != kv.head_dim) refuse("KV heads or head_dim differ from the KV cache");
  if (heads <= 0 || heads % kv_heads != 0) refuse("heads must be a multiple of KV heads");
  if (kv_layer < 0 || kv_layer >= kv.layers) refuse("no KV layer " + std::to_string(kv_layer));
  c.kv_layer = kv_layer;
  c.attn = {heads, kv_heads, head_dim, 0, 1.0f, 0.0f};
  c.x = buf(qkv, (heads + 2 * kv_heads) * head_dim);
}

void CalbinBuilder::qk_norm_rope_kv(int layer, const BufArg& qkv, const BufArg& table, int kv_layer, const HeadsArg& h, int rope_dim,
                                    const std::optional<VectorArg>& q_norm, const std::optional<VectorArg>& k_norm, float eps) {
  Call& c = add(Op::qk_norm_rope_kv, layer);
  heads(c, h, kv_layer, qkv);
  if (rope_dim <= 0 || rope_dim % 2 != 0 || rope_dim > c.attn.head_dim) refuse("rope_dim must be even and at most head_dim");
  c.rope_dim = rope_dim;
  c.table = buf(table, rope_dim);
  c.q_norm = vector(q_norm, c.attn.head_dim);
  c.k_norm = vector(k_norm, c.attn.head_dim);
  c.eps = eps;
}

void CalbinBuilder::attention(int layer, const BufArg& qkv, int kv_layer, const HeadsArg& h, float scale, int window, float softcap,
                              const BufArg& out) {
  Call& c = add(Op::attention, layer);
  heads(c, h, kv_layer, qkv);
  if (window < 0) refuse("window is negative");
  c.attn.scale = scale;
  c.attn.window = window;
  c.attn.softcap = softcap;
  c.out = buf(out, c.attn.heads * c.attn.head_dim);
}

void CalbinBuilder::lm_head(int layer, const BufArg& x, const VectorArg& norm, float eps, const WeightArg& w,
                            const std::optional<VectorArg>& bias, float softcap, int first) {
  Call& c = add(Op::lm_head, layer);
  c.x = buf(x, 0);
  weight(c, w, c.x.width);
  if (first < 0 || first > calbin_->vocab - c.weight.n) refuse("lm_head has outputs beyond the vocabulary");
  if (calbin_->chips() == 1 && first != 0) refuse("the first chip's lm_head begins at 0");
  c.first = first;
  c.norm = {vector(norm, c.x.width), eps};
  c.bias = vector(bias, c.weight.n);
  c.softcap = softcap;
}

void CalbinBuilder::all_gather(int layer, const std::vector<BufArg>& parts, const BufArg& out, bool add) {
  Call& c = this->add(Op::all_gather, layer);
  c.out = buf(out, 0);
  c.add = add;
  int width = 0;
  for (const auto& [offset, w] : parts) {
    if (w < 0 || w > c.out.width - width) refuse("the parts of a gather are wider than its output");
    width += w;
    c.parts.push_back({offset, w});  // where it lies is checked when every chip's arena is known
  }
  if (width != c.out.width) refuse("the parts of a gather do not fill its output");
}

void CalbinBuilder::norm_add(int layer, const BufArg& x, const VectorArg& norm, float eps, const BufArg& residual) {
  Call& c = add(Op::norm_add, layer);
  c.x = buf(x, 0);
  c.norm = {vector(norm, c.x.width), eps};
  c.out = buf(residual, c.x.width);
}

void CalbinBuilder::layer_norm(int layer, const BufArg& x, const VectorArg& norm, const VectorArg& bias, float eps, const BufArg& out) {
  Call& c = add(Op::layer_norm, layer);
  c.x = buf(x, 0);
  c.norm = {vector(norm, c.x.width), eps};
  c.bias = vector(bias, c.x.width);
  c.out = buf(out, c.x.width);
}

// `kv` has room for the blocks of all lanes, each lane's first block being its own.
void CalbinBuilder::encoder_attention(int layer, const BufArg& qkv, const BufArg& kv, int kv_rows, const HeadsArg& h, float scale,
                                      const BufArg& out) {
  Call& c = add(Op::encoder_attention, layer);
  const auto [heads, kv_heads, head_dim] = h;
  if (kv_heads <= 0 || head_dim <= 0 || heads <= 0 || heads % kv_heads != 0) refuse("heads must be a multiple of KV heads");
  const Program& p = last();
  if (kv_rows < kBlockPositions * (p.rows / kBlockPositions + p.lanes)) refuse("the keys and values have too few rows");
  c.attn = {heads, kv_heads, head_dim, 0, scale, 0.0f};
  c.x = buf(qkv, (heads + 2 * kv_heads) * head_dim);
  c.table = buf(kv, 2 * kv_heads * head_dim, kv_rows);
  c.out = buf(out, heads * head_dim);
}

void CalbinBuilder::pool(int layer, const BufArg& x, const std::string& how, bool normalise) {
  Call& c = add(Op::pool, layer);
  c.x = buf(x, 0);
  c.pooling = static_cast<Pooling>(index_of(kPoolings, how, "pooling"));
  c.normalise = normalise;
  if (calbin_->embedding != 0 && calbin_->embedding != c.x.width) refuse("embeddings of two widths");
  calbin_->embedding = c.x.width;
}

void CalbinBuilder::classify(int layer, const BufArg& x, const WeightArg& w, const std::optional<VectorArg>& bias, const WeightArg& head,
                             const std::optional<VectorArg>& head_bias) {
  Call& c = add(Op::classify, layer);
  c.x = buf(x, 0);
  weight(c, head, 0);
  c.down = c.weight;
  const size_t head_bytes = c.weight_bytes;
  weight(c, w, c.x.width);
  c.weight_bytes += head_bytes;
  if (c.down.k != c.weight.n) refuse("the classifier's products do not fit each other");
  c.bias = vector(bias, c.weight.n);
  c.down_bias = vector(head_bias, c.down.n);
  c.act = Act::tanh;
  c.epilogue = Epilogue::activated;
  if (calbin_->labels != 0 && calbin_->labels != c.down.n) refuse("classifiers of two sizes");
  calbin_->labels = c.down.n;
}

void CalbinBuilder::moe_route(int layer, const BufArg& x, const VectorArg& norm, float eps, const WeightArg& w, int top_k, bool renormalise,
                              const std::vector<int>& starts, const BufArg& out) {
  Call& c = add(Op::moe_route, layer);
  c.x = buf(x, 0);
  weight(c, w, c.x.width);
  c.norm = {vector(norm, c.x.width), eps};
  if (top_k < 1 || top_k > kMostChosen || top_k > c.weight.n || c.weight.n > kMostExperts) refuse("top_k or the number of experts is out of range");
  if (starts.empty() || starts[0] != 0 || !std::is_sorted(starts.begin(), starts.end()) || starts.back() >= c.weight.n)
    refuse("the chips' experts do not begin at 0 and follow each other");
  c.top_k = top_k;
  c.renormalise = renormalise;
  c.starts = starts;
  c.out = buf(out, 3 * top_k);
}

void CalbinBuilder::moe_experts(int layer, const BufArg& x, const VectorArg& norm, float eps, const WeightArg& up, const WeightArg& down,
                                const std::string& act, const BufArg& choice, int top_k, int first, int experts, int all, const BufArg& out) {
  Call& c = add(Op::moe_experts, layer);
  c.x = buf(x, 0);
  c.norm = {vector(norm, c.x.width), eps};
  if (experts < 1 || experts > kMostExperts || first < 0 || all < experts || top_k < 1 || top_k > kMostChosen) refuse("a number of experts is out of range");
  weight(c, down, 0);
  c.down = c.weight;
  const size_t down_bytes = c.weight_bytes;
  weight(c, up, c.x.width);
  c.weight_bytes += down_bytes;
  if (c.weight.n % experts != 0 || c.down.n % experts != 0 || c.weight.n / experts != 2 * c.down.k || c.down.k % kLane != 0)
    refuse("the experts' products do not fit each other");
  if (c.down.n / experts != c.x.width || c.x.width % kLane != 0) refuse("an expert gives back another width than it takes");
  c.act = static_cast<Act>(index_of(kActs, act, "activation"));
  c.table = buf(choice, 3 * top_k);
  c.top_k = top_k;
  c.first = first;
  c.experts = experts;
  c.starts = {all};
  c.out = buf(out, top_k * c.x.width);
}

void CalbinBuilder::moe_combine(int layer, const std::vector<BufArg>& parts, const BufArg& choice, int top_k, const std::vector<int>& starts,
                                const BufArg& residual) {
  Call& c = add(Op::moe_combine, layer);
  c.out = buf(residual, 0);
  if (top_k < 1 || top_k > kMostChosen || parts.size() != starts.size() || starts.empty()) refuse("a combination has not one part per chip");
  for (const auto& [offset, w] : parts) {
    if (w != top_k * c.out.width) refuse("experts' outputs have another width than what they are added to");
    c.parts.push_back({offset, w});
  }
  c.table = buf(choice, 3 * top_k);
  c.top_k = top_k;
  c.starts = starts;
}

void init_program(nb::module_& m) {
  nb::class_<CalbinBuilder>(m, "CalbinBuilder", "Maps a parameter shard and takes programs call by call; ValueError names what does not fit.")
      .def("__init__",
           [](CalbinBuilder* self, const std::string& params, int vocab, const std::string& kv_dtype, int layers, int kv_heads, int head_dim,
              int blocks) {
             if (vocab <= 0 || layers < 0 || kv_heads <= 0 || head_dim <= 0 || blocks < (layers > 0 ? 1 : 0)) refuse("sizes must be positive");
             if (head_dim % 2 != 0) refuse("head_dim must be even");
             new (self) CalbinBuilder(params, vocab, {kv_type(kv_dtype), layers, kv_heads, head_dim, blocks});
           },
           "params"_a, "vocab"_a, "kv_dtype"_a, "layers"_a, "kv_heads"_a, "head_dim"_a, "blocks"_a)
      .def("chip", &CalbinBuilder::chip, "params"_a, "kv_heads"_a)
      .def("program", &CalbinBuilder::program, "rows"_a, "lanes"_a, "context"_a, "arena_bytes"_a)
      .def("embed", &CalbinBuilder::embed, "layer"_a, "weight"_a, "scale"_a, "out"_a, "index"_a, "add"_a)
      .def("rope_table", &CalbinBuilder::rope_table, "layer"_a, "inv_freq"_a, "attention_factor"_a, "out"_a)
      .def("norm_linear", &CalbinBuilder::norm_linear, "layer"_a, "x"_a, "norm"_a, "eps"_a, "weight"_a, "bias"_a.none(), "gated"_a.none(), "out"_a)
      .def("linear", &CalbinBuilder::linear, "layer"_a, "x"_a, "weight"_a, "bias"_a.none(), "residual"_a, "act"_a.none(), "out"_a)
      .def("qk_norm_rope_kv", &CalbinBuilder::qk_norm_rope_kv, "layer"_a, "qkv"_a, "table"_a, "kv_layer"_a, "heads"_a, "rope_dim"_a,
           "q_norm"_a.none(), "k_norm"_a.none(), "eps"_a)
      .def("attention", &CalbinBuilder::attention, "layer"_a, "qkv"_a, "kv_layer"_a, "heads"_a, "scale"_a, "window"_a, "softcap"_a, "out"_a)
      .def("lm_head", &CalbinBuilder::lm_head, "layer"_a, "x"_a, "norm"_a, "eps"_a, "weight"_a, "bias"_a.none(), "softcap"_a, "first"_a)
      .def("all_gather", &CalbinBuilder::all_gather, "layer"_a, "parts"_a, "out"_a, "add"_a)
      .def("norm_add", &CalbinBuilder::norm_add, "layer"_a, "x"_a, "norm"_a, "eps"_a, "residual"_a)
      .def("layer_norm", &CalbinBuilder::layer_norm, "layer"_a, "x"_a, "norm"_a, "bias"_a, "eps"_a, "out"_a)
      .def("encoder_attention", &CalbinBuilder::encoder_attention, "layer"_a, "qkv"_a, "kv"_a, "kv_rows"_a, "heads"_a, "scale"_a, "out"_a)
      .def("pool", &CalbinBuilder::pool, "layer"_a, "x"_a, "how"_a, "normalise"_a)
      .def("classify", &CalbinBuilder::classify, "layer"_a, "x"_a, "weight"_a, "bias"_a.none(), "head"_a, "head_bias"_a.none())
      .def("moe_route", &CalbinBuilder::moe_route, "layer"_a, "x"_a, "norm"_a, "eps"_a, "weight"_a, "top_k"_a, "renormalise"_a, "starts"_a, "out"_a)
      .def("moe_experts", &CalbinBuilder::moe_experts, "layer"_a, "x"_a, "norm"_a, "eps"_a, "up"_a, "down"_a, "act"_a, "choice"_a, "top_k"_a,
           "first"_a, "experts"_a, "all"_a, "out"_a)
      .def("moe_combine", &CalbinBuilder::moe_combine, "layer"_a, "parts"_a, "choice"_a, "top_k"_a, "starts"_a, "residual"_a);
}

}  // namespace calstack::bind
