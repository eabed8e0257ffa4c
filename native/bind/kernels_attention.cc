// `_core.kernels`: rope, KV write, attention and the sampler, one call on numpy arrays each, for tests and benchmarks.
#include "kernels.h"

#include "../src/kv_layout.h"
#include "builder.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <vector>

namespace calstack::bind {
namespace {

using Ints = Array<const int32_t, 1>;
using Floats = std::optional<Array<const float, 1>>;

// A cache of one layer: blocks of K then V, and one block table per lane.
struct PyCache {
  Array<uint8_t, 2> blocks;
  Array<const int32_t, 2> tables;
  AttnShape shape;
  std::vector<const int32_t*> lane_tables;
  KVView view;

  PyCache(Array<uint8_t, 2> bytes, Array<const int32_t, 2> block_ids, const std::string& type, int heads, int kv_heads, int head_dim, int window, float scale,
          float softcap)
      : blocks(bytes), tables(block_ids), shape{heads, kv_heads, head_dim, window, scale, softcap}, view{} {
    require(head_dim > 0 && head_dim <= 256 && head_dim % 2 == 0 && kv_heads > 0 && heads > 0 && heads % kv_heads == 0, "[kernels] heads or head_dim do not fit");
    const KVType kv = kv_type(type);
    const size_t bytes_needed = KVPlaces(kv, kv_heads, head_dim).bytes();
    require(bytes.shape(1) >= bytes_needed, "[kernels] a block is smaller than K and V of one layer");
    for (size_t i = 0; i < block_ids.size(); ++i)
      require(block_ids.data()[i] >= 0 && (size_t)block_ids.data()[i] < bytes.shape(0), "[kernels] a block id is outside the cache");
    for (size_t i = 0; i < block_ids.shape(0); ++i) lane_tables.push_back(block_ids.data() + i * block_ids.shape(1));
    view = {kv, blocks.data(), blocks.shape(1), blocks.shape(1) - bytes_needed, kv_heads, head_dim, lane_tables.data()};
  }
  size_t row_floats() const { return (size_t)(shape.heads + 2 * shape.kv_heads) * shape.head_dim; }

  void check(int lane, int position) const {
    require(lane >= 0 && (size_t)lane < tables.shape(0), "[kernels] no such lane");
    require(position >= 0 && (size_t)position / kBlockPositions < tables.shape(1), "[kernels] a position is outside the lane's blocks");
  }
};

auto rope_table(const std::string& isa, Array<const float, 1> inv_freq, Ints positions, double factor) {
  auto out = zeros<float>(positions.size(), 2 * inv_freq.size());
  table_named(isa).rope_table(inv_freq.data(), (int)inv_freq.size(), factor, positions.data(), out.data(), out.shape(1), 0, (int)positions.size());
  return out;
}

void qk_norm_rope_kv(const std::string& isa, PyCache& cache, Array<float, 2> qkv, Ints lanes, Ints positions,
                     const std::optional<Array<const float, 2>>& table, const Floats& q_norm, const Floats& k_norm, float eps) {
  const size_t rows = qkv.shape(0), dim = (size_t)cache.shape.head_dim;
  require(qkv.shape(1) >= cache.row_floats() && lanes.size() == rows && positions.size() == rows, "[kernels] qkv, lanes and positions do not fit");
  for (size_t i = 0; i < rows; ++i) cache.check(lanes.data()[i], positions.data()[i]);
  require(!table || (table->shape(0) == rows && table->shape(1) <= dim), "[kernels] the rope table must be [rows, <= head_dim]");
  require((!q_norm || q_norm->size() == dim) && (!k_norm || k_norm->size() == dim), "[kernels] q and k norms must have head_dim values");
  const KernelTable& t = table_named(isa);
  const int heads = cache.shape.kv_heads, half = &t == kernels_reference() ? heads : heads / 2;  // in two parts against the reference's one
  for (const auto& [h0, h1] : {std::pair(0, half), std::pair(half, heads)})
    t.qk_norm_rope_kv(qkv.data(), qkv.shape(1), table ? table->data() : nullptr, table ? table->shape(1) : 0, table ? (int)table->shape(1) : 0,
                      data_or_null(q_norm), data_or_null(k_norm), eps, cache.shape, cache.view, lanes.data(), positions.data(), 0, (int)rows, h0, h1);
}

void check_rows(const PyCache& cache, const Array<const float, 2>& qkv, int lane, const Ints& positions) {
  require(qkv.shape(1) >= cache.row_floats() && positions.size() == qkv.shape(0), "[kernels] qkv and positions do not fit");
  for (size_t i = 0; i < positions.size(); ++i) {
    cache.check(lane, positions.data()[i]);
    require(positions.data()[i] == positions.data()[0] + (int32_t)i, "[kernels] positions must be consecutive");
  }
}

auto attention(const std::string& isa, const PyCache& cache, Array<const float, 2> qkv, int lane, Ints positions) {
  check_rows(cache, qkv, lane, positions);
  std::vector<uint8_t> scratch(attention_scratch_bytes(cache.shape));
  auto out = zeros<float>(qkv.shape(0), (size_t)cache.shape.heads * cache.shape.head_dim);
  for (int h = 0; h < cache.shape.kv_heads; ++h)
    table_named(isa).attention(qkv.data(), qkv.shape(1), cache.shape, cache.view, lane, positions.data(), h, 0, (int)qkv.shape(0), out.data(),
                               out.shape(1), scratch.data());
  return out;
}

// Every split of one row: ml [splits * 2, heads] and o [splits * heads, head_dim], those of the KV heads [h0, h1) filled.
auto attention_splits(const std::string& isa, const PyCache& cache, Array<const float, 2> qkv, int lane, int row, int position, int h0, int h1) {
  require(row >= 0 && (size_t)row < qkv.shape(0) && qkv.shape(1) >= cache.row_floats(), "[kernels] no such row");
  require(0 <= h0 && h0 <= h1 && h1 <= cache.shape.kv_heads, "[kernels] no such KV heads");
  cache.check(lane, position);
  std::vector<uint8_t> scratch(attention_scratch_bytes(cache.shape));
  const size_t splits = (size_t)position / kSplitKeys + 1, heads = (size_t)cache.shape.heads, dim = (size_t)cache.shape.head_dim;
  auto ml = zeros<float>(splits * 2, heads), o = zeros<float>(splits * heads, dim);
  for (size_t i = 0; i < splits; ++i)
    table_named(isa).attention_split(qkv.data(), qkv.shape(1), cache.shape, cache.view, lane, position, h0, h1, row, (int)i,
                                     ml.data() + i * heads * 2, o.data() + i * heads * dim, scratch.data());
  return nb::make_tuple(ml, o);
}

void attention_merge(const std::string& isa, const PyCache& cache, Array<const float, 2> ml, Array<const float, 2> o, int h0, int h1,
                     Array<float, 2> out) {
  const size_t heads = (size_t)cache.shape.heads, splits = ml.shape(0) / 2;
  require(ml.shape(1) == heads && splits * 2 == ml.shape(0), "[kernels] ml must be [splits * 2, heads]");
  require(o.shape(0) == splits * heads && o.shape(1) == (size_t)cache.shape.head_dim, "[kernels] o must be [splits * heads, head_dim]");
  require(out.shape(0) == 1 && out.shape(1) == heads * (size_t)cache.shape.head_dim, "[kernels] out must be [1, heads * head_dim]");
  require(0 <= h0 && h0 <= h1 && h1 <= cache.shape.heads, "[kernels] no such heads");
  table_named(isa).attention_merge(cache.shape, ml.data(), o.data(), (int)splits, h0, h1, out.data());
}

struct PySample {
  SampleArgs args{};
  std::vector<int32_t> bias_ids, prompt, output;
  std::vector<float> bias;
  std::vector<uint32_t> mask;
};

void fill_lists(PySample& s, const std::optional<Ints>& bias_ids, const Floats& bias, const std::optional<Ints>& prompt,
                const std::optional<Ints>& output, const std::optional<Array<const uint32_t, 1>>& mask) {
  const auto copy = [](auto& to, const auto& from) {
    if (from) to.assign(from->data(), from->data() + from->size());
  };
  copy(s.bias_ids, bias_ids);
  copy(s.bias, bias);
  copy(s.prompt, prompt);
  copy(s.output, output);
  copy(s.mask, mask);
  require(s.bias_ids.size() == s.bias.size(), "[kernels] bias_ids and bias must have the same size");
  s.args.bias_ids = s.bias_ids.data(), s.args.bias = s.bias.data(), s.args.n_bias = (int)s.bias.size();
  s.args.prompt = s.prompt.data(), s.args.n_prompt = (int)s.prompt.size();
  s.args.output = s.output.data(), s.args.n_output = (int)s.output.size();
  s.args.mask = mask ? s.mask.data() : nullptr;
}

// Changes logits in place; returns (token, logprob, top ids, top log-probabilities).
auto sample(const std::string& isa, Array<float, 1> logits, float softcap, float temperature, int top_k, float top_p, float min_p,
            float repetition, float frequency, float presence, const std::optional<Ints>& bias_ids, const Floats& bias,
            const std::optional<Ints>& prompt, const std::optional<Ints>& output, const std::optional<Array<const uint32_t, 1>>& mask,
            uint64_t seed, uint64_t choice, uint64_t index, int top_logprobs) {
  PySample s;
  s.args.temperature = temperature, s.args.top_p = top_p, s.args.min_p = min_p, s.args.top_k = top_k;
  s.args.repetition = repetition, s.args.frequency = frequency, s.args.presence = presence;
  s.args.seed = seed, s.args.choice = choice, s.args.index = index, s.args.top_logprobs = top_logprobs;
  fill_lists(s, bias_ids, bias, prompt, output, mask);
  require(logits.size() > 0 && (!mask || s.mask.size() * 32 >= logits.size()), "[kernels] mask must have a bit per logit");
  const size_t n = top_logprobs > 0 ? (size_t)top_logprobs : 0;
  auto ids = zeros<int32_t>(1, n);
  auto logprobs = zeros<float>(1, n);
  SampleOut out{0, 0.0f, ids.data(), logprobs.data()};
  std::vector<double> scratch(logits.size() * 2);
  table_named(isa).sample(logits.data(), (int)logits.size(), softcap, s.args, out, scratch.data());
  return nb::make_tuple(out.token, out.logprob, ids, logprobs);
}

}  // namespace

void init_kernels_attention(nb::module_& core) {
  nb::module_ m = nb::cast<nb::module_>(core.attr("kernels"));
  nb::class_<PyCache>(m, "Cache")
      .def(nb::init<Array<uint8_t, 2>, Array<const int32_t, 2>, const std::string&, int, int, int, int, float, float>(), nb::arg("blocks"), nb::arg("tables"),
           nb::arg("type"), nb::arg("heads"), nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("window") = 0, nb::arg("scale") = 1.0f,
           nb::arg("softcap") = 0.0f, "A view (layout kv64.v1) of blocks [n, bytes], K and V of one layer at each block's end, and tables [lanes, n].");
  m.def("rope_table", &rope_table, nb::arg("isa"), nb::arg("inv_freq"), nb::arg("positions"), nb::arg("factor") = 1.0,
        "cos then sin, [positions, 2 * frequencies].");
  m.def("qk_norm_rope_kv", &qk_norm_rope_kv, nb::arg("isa"), nb::arg("cache"), nb::arg("qkv"), nb::arg("lanes"), nb::arg("positions"),
        nb::arg("table") = nb::none(), nb::arg("q_norm") = nb::none(), nb::arg("k_norm") = nb::none(), nb::arg("eps") = 0.0f,
        "Changes qkv [rows, (heads + 2 kv_heads) * head_dim] in place and writes K and V to the cache.");
  m.def("attention", &attention, nb::arg("isa"), nb::arg("cache"), nb::arg("qkv"), nb::arg("lane"), nb::arg("positions"),
        "Attention of consecutive rows of one lane, [rows, heads * head_dim].");
  m.def("attention_splits", &attention_splits, nb::arg("isa"), nb::arg("cache"), nb::arg("qkv"), nb::arg("lane"), nb::arg("row"),
        nb::arg("position"), nb::arg("h0"), nb::arg("h1"), "Partials of one row for KV heads [h0, h1): ml [splits * 2, heads], o [splits * heads, head_dim].");
  m.def("attention_merge", &attention_merge, nb::arg("isa"), nb::arg("cache"), nb::arg("ml"), nb::arg("o"), nb::arg("h0"), nb::arg("h1"), nb::arg("out"),
        "Merges partials of heads [h0, h1) into out [1, heads * head_dim].");
  m.def("sample", &sample, nb::arg("isa"), nb::arg("logits"), nb::arg("softcap") = 0.0f, nb::arg("temperature") = 0.0f, nb::arg("top_k") = 0,
        nb::arg("top_p") = 1.0f, nb::arg("min_p") = 0.0f, nb::arg("repetition") = 1.0f, nb::arg("frequency") = 0.0f, nb::arg("presence") = 0.0f,
        nb::arg("bias_ids") = nb::none(), nb::arg("bias") = nb::none(), nb::arg("prompt") = nb::none(), nb::arg("output") = nb::none(),
        nb::arg("mask") = nb::none(), nb::arg("seed") = 0, nb::arg("choice") = 0, nb::arg("index") = 0, nb::arg("top_logprobs") = -1,
        "Changes logits in place; (token, logprob, top ids [1, n], top log-probabilities [1, n]).");
}

}  // namespace calstack::bind
