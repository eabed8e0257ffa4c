// `_core.kernels`: the kernels of the linear family, one call on numpy arrays each, for tests and benchmarks.
#include "kernels.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "../src/packed.h"
#include "calstack/ceilings.h"

namespace calstack::bind {
namespace {

using F32Rows = Array<const float, 2>;
using Floats = std::optional<Array<const float, 1>>;

WFmt format_named(const std::string& name) {
  const std::pair<const char*, WFmt> known[] = {{"w4a8", WFmt::w4a8}, {"w8a8", WFmt::w8a8}, {"w4a16", WFmt::w4a16},
                                                {"bf16", WFmt::bf16}, {"f16", WFmt::f16},   {"f32", WFmt::f32}};
  for (const auto& [text, format] : known)
    if (name == text) return format;
  throw nb::value_error("[kernels] format must be w4a8, w8a8, w4a16, bf16, f16 or f32");
}

Epilogue epilogue_named(const std::string& name) {
  if (name == "store") return Epilogue::store;
  if (name == "residual") return Epilogue::residual;
  if (name == "activated") return Epilogue::activated;
  require(name == "gated", "[kernels] epilogue must be store, residual, activated or gated");
  return Epilogue::gated;
}

Act act_named(const std::string& name) {
  if (name == "silu") return Act::silu;
  if (name == "gelu_tanh") return Act::gelu_tanh;
  if (name == "tanh") return Act::tanh;
  require(name == "gelu", "[kernels] act must be silu, gelu_tanh, gelu or tanh");
  return Act::gelu;
}

int blocks_of(int n, Epilogue ep) { return ep == Epilogue::gated ? 2 * ((n / 2 + kLane - 1) / kLane) : (n + kLane - 1) / kLane; }

// A packed weight as Python hands it over, checked against its sizes.
struct PyWeight {
  Array<const uint8_t, 1> data;
  Weight w;
  PyWeight(Array<const uint8_t, 1> bytes, const std::string& format, int n, int k, int group, bool minimum)
      : data(bytes), w{bytes.data(), format_named(format), n, k, group, minimum} {
    require(n > 0 && k > 0, "[kernels] n and k must be positive");
    require(!is_grouped(w.format) || ((group == 32 || group == 64 || group == 128) && k % group == 0),
            "[kernels] group must be 32, 64 or 128 and divide k");
    require(!minimum || w.format != WFmt::w8a8, "[kernels] w8a8 has no minimum");
    require(bytes.size() >= block_bytes(w) * (size_t)blocks_of(n, Epilogue::store), "[kernels] weight data are too short");
  }
};

struct Range {
  int nb0, nb1;
};

// Checks what a linear call writes, and gives the blocks it takes (all, unless blocks says otherwise).
Range check_out(const PyWeight& weight, Epilogue ep, size_t rows, const Floats& bias, const Array<float, 2>& out,
                const std::optional<std::tuple<int, int>>& blocks) {
  const Weight& w = weight.w;
  const int count = blocks_of(w.n, ep), columns = ep == Epilogue::gated ? w.n / 2 : w.n;
  require(weight.data.size() >= block_bytes(w) * (size_t)count, "[kernels] weight data are too short for pairs of blocks");
  require(out.shape(0) == rows && out.shape(1) >= (size_t)columns, "[kernels] out is too small");
  const size_t needed = ep == Epilogue::gated ? (size_t)((count - 1) * kLane + columns - (count / 2 - 1) * kLane) : (size_t)w.n;
  require(!bias || bias->size() >= needed, "[kernels] bias is too short");
  const Range r = blocks ? Range{std::get<0>(*blocks), std::get<1>(*blocks)} : Range{0, count};
  const bool aligned = ep != Epilogue::gated || (r.nb0 % 2 == 0 && r.nb1 % 2 == 0 && w.n % 2 == 0);
  require(0 <= r.nb0 && r.nb0 <= r.nb1 && r.nb1 <= count && aligned, "[kernels] blocks are out of range");
  return r;
}

auto quant_rows(const std::string& isa, F32Rows x, Floats norm, float eps, int group) {
  const size_t rows = x.shape(0), k = x.shape(1);
  require(group == 32 || group == 64 || group == 128, "[kernels] group must be 32, 64 or 128");
  require(k % (size_t)group == 0 && (!norm || norm->size() == k), "[kernels] k must be a multiple of the group and the norm's size");
  auto codes = zeros<int8_t>(rows, k);
  auto scale = zeros<float>(rows, k / group), asum = zeros<float>(rows, k / group);
  auto isum = zeros<int32_t>(rows, k / group);
  const QuantRows out{codes.data(), scale.data(), asum.data(), isum.data(), (int)k, group};
  table_named(isa).quant_rows(x.data(), k, NormSpec{data_or_null(norm), eps}, out, 0, (int)rows);
  return nb::make_tuple(codes, scale, asum, isum);
}

auto norm_rows(const std::string& isa, F32Rows x, Floats norm, float eps) {
  const size_t rows = x.shape(0), n = x.shape(1);
  require(!norm || norm->size() == n, "[kernels] the norm's weight must have n values");
  auto y = zeros<float>(rows, n);
  table_named(isa).norm_rows(x.data(), n, NormSpec{data_or_null(norm), eps}, y.data(), n, (int)n, 0, (int)rows);
  return y;
}

void linear_q(const std::string& isa, const PyWeight& w, Array<const int8_t, 2> codes, Array<const float, 2> scale,
              Array<const float, 2> asum, Array<const int32_t, 2> isum, Array<float, 2> out, Floats bias, const std::string& epilogue,
              const std::string& act, std::optional<std::tuple<int, int>> blocks) {
  const size_t rows = codes.shape(0), groups = (size_t)(w.w.k / (w.w.group ? w.w.group : 1));
  require(w.w.format == WFmt::w4a8 || w.w.format == WFmt::w8a8, "[kernels] linear_q takes w4a8 and w8a8");
  require(codes.shape(1) == (size_t)w.w.k, "[kernels] codes must be [rows, k]");
  for (size_t n : {scale.size(), asum.size(), isum.size()}) require(n == rows * groups, "[kernels] scale, asum, isum: [rows, k / group]");
  const Epilogue ep = epilogue_named(epilogue);
  const Range r = check_out(w, ep, rows, bias, out, blocks);
  const QuantRows a{const_cast<int8_t*>(codes.data()), const_cast<float*>(scale.data()), const_cast<float*>(asum.data()),
                    const_cast<int32_t*>(isum.data()), w.w.k, w.w.group};
  table_named(isa).linear_q(w.w, a, (int)rows, data_or_null(bias), ep, act_named(act), out.data(), out.shape(1), r.nb0, r.nb1);
}

void linear_f(const std::string& isa, const PyWeight& w, F32Rows x, Array<float, 2> out, Floats bias, const std::string& epilogue,
              const std::string& act, std::optional<std::tuple<int, int>> blocks) {
  require(w.w.format != WFmt::w4a8 && w.w.format != WFmt::w8a8, "[kernels] linear_f takes w4a16, bf16, f16 and f32");
  require(x.shape(1) == (size_t)w.w.k, "[kernels] x must be [rows, k]");
  const Epilogue ep = epilogue_named(epilogue);
  const Range r = check_out(w, ep, x.shape(0), bias, out, blocks);
  table_named(isa).linear_f(w.w, x.data(), x.shape(1), (int)x.shape(0), data_or_null(bias), ep, act_named(act), out.data(), out.shape(1),
                            r.nb0, r.nb1);
}

auto embed_rows(const std::string& isa, const PyWeight& w, Array<const int32_t, 1> ids, float scale) {
  for (size_t i = 0; i < ids.size(); ++i)
    require(ids.data()[i] >= 0 && ids.data()[i] < w.w.n, "[kernels] an id is outside the embedding");
  auto out = zeros<float>(ids.size(), (size_t)w.w.k);
  table_named(isa).embed_rows(w.w, ids.data(), scale, out.data(), (size_t)w.w.k, 0, (int)ids.size());
  return out;
}

auto layer_norm_rows(const std::string& isa, F32Rows x, Array<const float, 1> weight, Array<const float, 1> bias, float eps) {
  const size_t rows = x.shape(0), n = x.shape(1);
  require(weight.size() == n && bias.size() == n, "[kernels] weight and bias must have n values");
  auto y = zeros<float>(rows, n);
  table_named(isa).layer_norm_rows(x.data(), n, weight.data(), bias.data(), eps, y.data(), n, (int)n, 0, (int)rows);
  return y;
}

auto pool_rows(const std::string& isa, F32Rows x, const std::string& how, bool normalise) {
  require(x.shape(0) > 0 && (how == "mean" || how == "cls"), "[kernels] at least one row, pooled by mean or cls");
  auto out = zeros<float>(1, x.shape(1));
  const Pooling pooling = how == "mean" ? Pooling::mean : Pooling::cls;
  table_named(isa).pool_rows(x.data(), x.shape(1), (int)x.shape(0), (int)x.shape(1), pooling, normalise, out.data());
  return out;
}

auto moe_route(const std::string& isa, F32Rows z, int top_k, bool renormalise) {
  const size_t rows = z.shape(0), experts = z.shape(1);
  require(top_k >= 1 && top_k <= kMostChosen && (size_t)top_k <= experts && experts <= (size_t)kMostExperts, "[kernels] top_k is out of range");
  auto weights = zeros<float>(rows, (size_t)top_k);
  auto chosen = zeros<int32_t>(rows, (size_t)top_k);
  for (size_t r = 0; r < rows; ++r)
    table_named(isa).moe_route(z.data() + r * experts, (int)experts, top_k, renormalise, weights.data() + r * (size_t)top_k,
                               chosen.data() + r * (size_t)top_k);
  return nb::make_tuple(weights, chosen);
}

void moe_combine(const std::string& isa, Array<const float, 1> weights, F32Rows parts, Array<float, 1> out) {
  require(parts.shape(0) == weights.size() && parts.shape(0) <= (size_t)kMostChosen, "[kernels] parts must be [top_k, n]");
  require(parts.shape(1) == out.size(), "[kernels] out must be [n]");
  const float* rows[kMostChosen];
  for (size_t j = 0; j < parts.shape(0); ++j) rows[j] = parts.data() + j * parts.shape(1);
  table_named(isa).moe_combine(weights.data(), rows, (int)parts.shape(0), out.data(), (int)out.size());
}

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (const char* name : {"reference", "portable", "avx2", "avx2_vnni", "avx512_vnni", "avx512_bf16"})
    if (kernels_by_name(name)) names.emplace_back(name);
  return names;
}

double int8_peak(const std::string& isa, int threads) {
  require(threads > 0 && threads <= 1024, "[kernels] threads must be between 1 and 1024");
  return int8_peak_gops(table_named(isa), threads);
}

double read_limit(const std::string& isa, int threads, size_t bytes) {
  require(threads > 0 && threads <= 1024, "[kernels] threads must be between 1 and 1024");
  require(bytes >= 1u << 20 && bytes <= size_t{16} << 30, "[kernels] bytes must be between 1 MiB and 16 GiB");
  return ReadCeiling(bytes).gbs(table_named(isa), threads);
}

}  // namespace

void init_kernels(nb::module_& core) {
  nb::module_ m = core.def_submodule("kernels", "Single kernels on numpy arrays, for tests. No part of the product's interface.");
  m.def("isas", &isas, "Instruction sets usable on this machine, the scalar reference first.");
  nb::class_<PyWeight>(m, "Weight")
      .def(nb::init<Array<const uint8_t, 1>, const std::string&, int, int, int, bool>(), nb::arg("data"), nb::arg("format"), nb::arg("n"),
           nb::arg("k"), nb::arg("group") = 0, nb::arg("minimum") = false, "A packed weight (layout n16.v1) of n outputs and k inputs.");
  m.def("quant_rows", &quant_rows, nb::arg("isa"), nb::arg("x"), nb::arg("norm") = nb::none(), nb::arg("eps") = 0.0f,
        nb::arg("group") = 32, "codes [rows, k], scale, asum, isum [rows, k / group] of norm(x).");
  m.def("norm_rows", &norm_rows, nb::arg("isa"), nb::arg("x"), nb::arg("norm") = nb::none(), nb::arg("eps") = 0.0f, "norm(x), f32.");
  m.def("linear_q", &linear_q, nb::arg("isa"), nb::arg("weight"), nb::arg("codes"), nb::arg("scale"), nb::arg("asum"), nb::arg("isum"),
        nb::arg("out"), nb::arg("bias") = nb::none(), nb::arg("epilogue") = "store", nb::arg("act") = "silu", nb::arg("blocks") = nb::none(),
        "Writes int8 products into out [rows, >= columns].");
  m.def("linear_f", &linear_f, nb::arg("isa"), nb::arg("weight"), nb::arg("x"), nb::arg("out"), nb::arg("bias") = nb::none(),
        nb::arg("epilogue") = "store", nb::arg("act") = "silu", nb::arg("blocks") = nb::none(),
        "Writes f32 products into out [rows, >= columns].");
  m.def("layer_norm_rows", &layer_norm_rows, nb::arg("isa"), nb::arg("x"), nb::arg("weight"), nb::arg("bias"), nb::arg("eps"),
        "Layer norm of rows, f32.");
  m.def("pool_rows", &pool_rows, nb::arg("isa"), nb::arg("x"), nb::arg("how"), nb::arg("normalise"), "One row of x [rows, n]: [1, n].");
  m.def("moe_route", &moe_route, nb::arg("isa"), nb::arg("z"), nb::arg("top_k"), nb::arg("renormalise"),
        "weights f32 and experts i32 [rows, top_k] of router logits [rows, experts].");
  m.def("moe_combine", &moe_combine, nb::arg("isa"), nb::arg("weights"), nb::arg("parts"), nb::arg("out"),
        "out [n] += the sum of weights [top_k] times parts [top_k, n].");
  m.def("int8_peak", &int8_peak, nb::arg("isa"), nb::arg("threads"), nb::call_guard<nb::gil_scoped_release>(),
        "GOP/s of int8 products over registers: the ceiling of compute.");
  m.def("read_limit", &read_limit, nb::arg("isa"), nb::arg("threads"), nb::arg("bytes"), nb::call_guard<nb::gil_scoped_release>(),
        "GB/s of a prefetching read over a buffer of `bytes`: the ceiling of memory.");
  m.def("embed_rows", &embed_rows, nb::arg("isa"), nb::arg("weight"), nb::arg("ids"), nb::arg("scale") = 1.0f, "Rows [ids, k], f32.");
}

}  // namespace calstack::bind
