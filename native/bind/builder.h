// A calbin on its way to the device: parameters mapped, programs added call by call.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "calstack/executor.h"

namespace calstack::bind {

using BufArg = std::tuple<size_t, int>;                                                // arena offset, width
using VectorArg = std::tuple<size_t, size_t, int>;                                     // file offset, bytes there, n
using WeightArg = std::tuple<size_t, size_t, std::string, int, int, int, bool>;        // file offset, bytes there, format, n, k, group, minimum
using HeadsArg = std::tuple<int, int, int>;                                            // heads, KV heads, head_dim

KVType kv_type(const std::string& name);

class CalbinBuilder {
 public:
  CalbinBuilder(const std::string& params, int vocab, const KVShape& kv);
  std::unique_ptr<Calbin> take();

  // What follows is the next chip's: its shard, and its share of the KV heads.
  void chip(const std::string& params, int kv_heads);
  int program(int rows, int lanes, int context, size_t arena_bytes);
  void embed(int layer, const WeightArg& w, float scale, const BufArg& out, const std::string& index, bool add);
  void rope_table(int layer, const VectorArg& inv_freq, double factor, const BufArg& out);
  void norm_linear(int layer, const BufArg& x, const VectorArg& norm, float eps, const WeightArg& w, const std::optional<VectorArg>& bias,
                   const std::optional<std::string>& gated, const BufArg& out);
  void linear(int layer, const BufArg& x, const WeightArg& w, const std::optional<VectorArg>& bias, bool residual,
              const std::optional<std::string>& act, const BufArg& out);
  void qk_norm_rope_kv(int layer, const BufArg& qkv, const BufArg& table, int kv_layer, const HeadsArg& h, int rope_dim,
                       const std::optional<VectorArg>& q_norm, const std::optional<VectorArg>& k_norm, float eps);
  void attention(int layer, const BufArg& qkv, int kv_layer, const HeadsArg& h, float scale, int window, float softcap, const BufArg& out);
  void lm_head(int layer, const BufArg& x, const VectorArg& norm, float eps, const WeightArg& w, const std::optional<VectorArg>& bias,
               float softcap, int first);
  void all_gather(int layer, const std::vector<BufArg>& parts, const BufArg& out, bool add);
  void norm_add(int layer, const BufArg& x, const VectorArg& norm, float eps, const BufArg& residual);
  void layer_norm(int layer, const BufArg& x, const VectorArg& norm, const VectorArg& bias, float eps, const BufArg& out);
  void encoder_attention(int layer, const BufArg& qkv, const BufArg& kv, int kv_rows, const HeadsArg& h, float scale, const BufArg& out);
  void pool(int layer, const BufArg& x, const std::string& how, bool normalise);
  void classify(int layer, const BufArg& x, const WeightArg& w, const std::optional<VectorArg>& bias, const WeightArg& head,
                const std::optional<VectorArg>& head_bias);
  void moe_route(int layer, const BufArg& x, const VectorArg& norm, float eps, const WeightArg& w, int top_k, bool renormalise,
                 const std::vector<int>& starts, const BufArg& out);
  void moe_experts(int layer, const BufArg& x, const VectorArg& norm, float eps, const WeightArg& up, const WeightArg& down,
                   const std::string& act, const BufArg& choice, int top_k, int first, int experts, int all, const BufArg& out);
  void moe_combine(int layer, const std::vector<BufArg>& parts, const BufArg& choice, int top_k, const std::vector<int>& starts,
                   const BufArg& residual);

 private:
  Program& last();
  Call& add(Op op, int layer);
  Buf buf(const BufArg& b, int width);
  Buf buf(const BufArg& b, int width, int rows);
  const uint8_t* bytes(size_t offset, size_t needed, size_t there);
  const float* vector(const std::optional<VectorArg>& v, int n);
  void weight(Call& c, const WeightArg& w, int k);
  void heads(Call& c, const HeadsArg& h, int kv_layer, const BufArg& qkv);

  void check_gathers() const;
  Calbin& part();  // the chip that is being built

  std::unique_ptr<Calbin> calbin_;
};

}  // namespace calstack::bind
