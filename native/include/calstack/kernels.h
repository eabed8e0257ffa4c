// The kernel seam: raw pointers and sizes, no Python, no allocation. One KernelTable per instruction set; the executor
// calls only through it. Numerics: docs/concepts/numerics.md. Every table gives the same bits as `reference`.
//
// Work is cut by the executor: row kernels take a row range [r0, r1), linear kernels a range of 16-output blocks [nb0, nb1).
#pragma once
#include <cstddef>
#include <cstdint>

namespace calstack {

enum class WFmt : int32_t { w4a8, w8a8, w4a16, bf16, f16, f32 };
enum class KVType : int32_t { f32, bf16, bf16_v8, i8 };
enum class Act : int32_t { silu, gelu_tanh, gelu, tanh };
enum class Epilogue : int32_t { store, residual, gated, activated };
enum class Pooling : int32_t { mean, cls };

constexpr int kLane = 16;           // outputs per packed block, lanes of a lane sum
constexpr int kKeyTile = 64;        // keys per attention tile
constexpr int kSplitKeys = 256;     // keys per attention split: fine enough that two threads share one context evenly
constexpr int kMostExperts = 1024;  // and kMostChosen of them for a row
constexpr int kMostChosen = 64;
constexpr int kBlockPositions = 64; // positions per KV block: one key tile

// A packed weight, layout n16.v1. Blocks of 16 outputs, then groups of K inside a block:
//   w4: group*8 bytes of codes (for j in group/8, lane i, byte b at 64*j + 4*i + b: low nibble k = 8j+b, high nibble k = 8j+4+b),
//       then 16 f16 scales, then (with minimum) 16 f16 minima
//   w8: group*16 bytes (for j in group/4: lane i, byte b at 64*j + 4*i + b: k = 4j+b, stored as code + 128), then 16 f16 scales
//   bf16/f16/f32: [k][16] elements, no groups
// N is padded to a multiple of 16 with zero codes and scales.
struct Weight {
  const uint8_t* data;
  WFmt format;
  int n, k, group;
  bool minimum;
  const uint8_t* after = nullptr;  // what the caller reads behind the last block; null: unknown, and the first block is cold
};

// Quantised activations of `rows` rows: codes [rows][k], then scale [rows][k/group] and asum, isum of the same shape.
struct QuantRows {
  int8_t* codes;
  float* scale;
  float* asum;
  int32_t* isum;
  int k, group;
};

struct NormSpec {
  const float* weight;  // null = no norm
  float eps;
};

// Where rows of the launch sit: lane and absolute position per row.
struct KVView {
  KVType type;
  uint8_t* base;               // block 0
  size_t block_bytes;          // all layers of one block
  size_t layer_offset;         // of this call's layer inside a block: K then V
  int kv_heads, head_dim;
  const int32_t* const* tables;  // per lane: block ids
  // Inside a layer of a block (layout kv64.v1): K of every KV head, V of every KV head, then for int8 planes their f32 scales
  // [kv_head][64], K's before V's (src/kv_layout.h). f32: K = [head_dim][64 keys], V = [64 keys][head_dim]. bf16 and int8: K in pairs of
  // dimensions, [head_dim/2][64 keys][2], V in pairs of keys, [64/2][head_dim][2].
};

struct AttnShape {
  int heads, kv_heads, head_dim, window;  // window 0 = none
  float scale, softcap;                   // softcap 0 = none
};

struct SampleArgs {  // one row
  float temperature, top_p, min_p, repetition, frequency, presence;
  int top_k;
  const int32_t* bias_ids; const float* bias; int n_bias;
  const int32_t* prompt; int n_prompt;
  const int32_t* output; int n_output;
  const uint32_t* mask;   // ceil(vocab/32) words or null; bit set = allowed
  uint64_t seed, choice, index;
  int top_logprobs;       // -1 none: logprob is 0
};

struct SampleOut {
  int32_t token;      // -1: no token, the logits hold NaN or nothing finite is allowed
  float logprob;
  int32_t* top_ids;   // top_logprobs entries
  float* top_logprobs;
};

struct KernelTable {
  const char* name;

  // y = norm(x) (or x) quantised, rows [r0, r1); x row stride xs floats.
  void (*quant_rows)(const float* x, size_t xs, const NormSpec& norm, const QuantRows& out, int r0, int r1);
  // y = norm(x) as f32, rows [r0, r1).
  void (*norm_rows)(const float* x, size_t xs, const NormSpec& norm, float* y, size_t ys, int n, int r0, int r1);
  // Layer norm of rows [r0, r1); y may be x.
  void (*layer_norm_rows)(const float* x, size_t xs, const float* weight, const float* bias, float eps, float* y, size_t ys, int n, int r0, int r1);
  // One text's rows to one row of n values.
  void (*pool_rows)(const float* x, size_t xs, int rows, int n, Pooling how, bool normalise, float* out);
  // quantised linear over rows [0, rows) and blocks [nb0, nb1). gated: blocks come in (gate, up) pairs, nb0 and nb1 even, out has n/2
  // columns; where n/2 is no multiple of 16 each half is padded, so there are 2*ceil(n/32) blocks. bias[16*nb + lane], packed order.
  void (*linear_q)(const Weight& w, const QuantRows& a, int rows, const float* bias, Epilogue ep, Act act,
                   float* out, size_t os, int nb0, int nb1);
  // f32-activation linear (w4a16, bf16, f16, f32).
  void (*linear_f)(const Weight& w, const float* x, size_t xs, int rows, const float* bias, Epilogue ep, Act act,
                   float* out, size_t os, int nb0, int nb1);
  void (*embed_rows)(const Weight& w, const int32_t* ids, float scale, float* out, size_t os, int r0, int r1);
  // out row = cos[dim/2], sin[dim/2]
  void (*rope_table)(const float* inv_freq, int half, double attention_factor, const int32_t* positions, float* out, size_t os, int r0, int r1);
  // q/k norm (weights may be null), rope, KV write; rows [r0, r1), kv heads [h0, h1) and their query heads.
  void (*qk_norm_rope_kv)(float* qkv, size_t xs, const float* table, size_t ts, int rope_dim, const float* q_norm, const float* k_norm, float eps,
                          const AttnShape& s, const KVView& kv, const int32_t* lanes, const int32_t* positions, int r0, int r1,
                          int h0, int h1);
  // Attention of rows [r0, r1) of ONE lane (consecutive positions) for kv head h (all its query heads). scratch: see attention_scratch_bytes.
  void (*attention)(const float* qkv, size_t xs, const AttnShape& s, const KVView& kv, int lane, const int32_t* positions, int kv_head,
                    int r0, int r1, float* out, size_t os, void* scratch);
  // One split of decode attention of one row, for kv heads [h0, h1): theirs of M [heads], L [heads] (M = -inf: nothing seen) in ml and of
  // o [heads][head_dim].
  void (*attention_split)(const float* qkv, size_t xs, const AttnShape& s, const KVView& kv, int lane, int position, int h0, int h1, int row,
                          int split, float* ml, float* o, void* scratch);
  // Merge partials ml [splits][2][heads], o [splits][heads][head_dim] of consecutive splits in ascending order into heads [h0, h1) of the
  // row `out`. Splits before the window may be left out.
  void (*attention_merge)(const AttnShape& s, const float* ml, const float* o, int splits, int h0, int h1, float* out);
  // One row of router logits: the top_k experts and their weights, in order of choice.
  void (*moe_route)(const float* z, int experts, int top_k, bool renormalise, float* weights, int32_t* chosen);
  // out += sum over j < top_k of weights[j] * parts[j], n values.
  void (*moe_combine)(const float* weights, const float* const* parts, int top_k, float* out, int n);
  // Sample one row; logits are changed in place. scratch: vocab * 16 bytes.
  void (*sample)(float* logits, int vocab, float softcap, const SampleArgs& args, SampleOut& out, void* scratch);
};

size_t attention_scratch_bytes(const AttnShape& s);  // per worker

const KernelTable* kernels_reference();    // scalar, word for word numerics.md
const KernelTable* kernels_portable();     // always there
const KernelTable* kernels_avx2();         // null when the CPU lacks AVX2+FMA+F16C
const KernelTable* kernels_avx2_vnni();    // avx2 with AVX-VNNI products in linear_q
const KernelTable* kernels_avx512_vnni();  // null when the CPU lacks AVX-512 F/BW/VL/DQ/VNNI
const KernelTable* kernels_avx512_bf16();  // avx512_vnni with bf16 products in attention
// "reference", "portable", "avx2", "avx2_vnni", "avx512_vnni", "avx512_bf16", "" = best; null when unknown or unusable here.
const KernelTable* kernels_by_name(const char* name);

}  // namespace calstack
