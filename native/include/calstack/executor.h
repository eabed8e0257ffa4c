// Runs programs: the fused calls of a submodel over planned buffers, through a KernelTable and a ThreadPool.
// Everything a step needs is sized when a calbin is loaded; running a launch allocates nothing.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "calstack/kernels.h"
#include "calstack/thread_pool.h"

namespace calstack {

// Address space that the kernel fills on first touch and `discard` gives back. Throws std::bad_alloc when it cannot be reserved.
enum class Pages { small, huge };

class Region {
 public:
  Region() = default;
  explicit Region(size_t bytes, Pages pages = Pages::small);
  ~Region();
  Region(Region&& other) noexcept;
  Region& operator=(Region&& other) noexcept;
  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }
  void discard(size_t offset, size_t bytes);  // whole pages; they read as zero afterwards
  template <class T>
  T* as() const { return reinterpret_cast<T*>(data_); }

 private:
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

// A file's bytes, read-only: copied into huge pages where half of the free memory holds them, for a pass over all weights is 3 to 6 %
// faster than over small pages; else mapped. Throws std::runtime_error naming the file.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  const uint8_t* data() const { return data_; }
  size_t size() const { return size_; }
  void readable(bool yes) const;  // whether a read of it faults; for tests that chips keep to their own shard

 private:
  const uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

struct KVShape {
  KVType type = KVType::f32;
  int layers = 0, kv_heads = 0, head_dim = 0, blocks = 0;
  size_t layer_bytes() const;  // of one block
};

// KV blocks of one calbin: address space for all, memory for those written. Used by the dispatcher only, but for `committed`.
class KVPool {
 public:
  explicit KVPool(const KVShape& shape);
  const KVShape& shape() const { return shape_; }
  size_t block_bytes() const { return shape_.layer_bytes() * static_cast<size_t>(shape_.layers); }
  size_t stride() const { return stride_; }
  uint8_t* base() const { return region_.data(); }
  size_t committed_bytes() const { return committed_.load(std::memory_order_relaxed) * stride_; }
  bool present(int block) const { return present_[static_cast<size_t>(block)] != 0; }
  void touch(int block);
  void clear(int block);
  void clear_all();
  void copy(int src, int dst);
  void save(int block, uint8_t* out) const;
  void restore(int block, const uint8_t* in);

 private:
  KVShape shape_;
  size_t stride_;  // whole pages, so that clearing a block gives all its memory back
  Region region_;
  std::vector<uint8_t> present_;
  std::atomic<size_t> committed_{0};
};

enum class Op : int32_t { embed, rope_table, norm_linear, qk_norm_rope_kv, attention, linear, lm_head, all_gather, moe_route, moe_experts, moe_combine, norm_add,
                          layer_norm, encoder_attention, pool, classify };
enum class Index : int32_t { ids, types, positions };  // what an embedding looks up
const char* op_name(Op op);

struct Buf {
  size_t offset = 0;  // bytes from the arena's start
  int width = 0;      // f32 per row
};

// One fused call; which fields count depends on `op`.
struct Call {
  Op op{};
  int layer = -1;
  Buf x, out, table;
  Weight weight{};
  size_t weight_bytes = 0;
  const float* bias = nullptr;
  NormSpec norm{nullptr, 0.0f};
  Epilogue epilogue = Epilogue::store;
  Act act = Act::silu;
  AttnShape attn{};
  int kv_layer = 0, rope_dim = 0;
  const float* q_norm = nullptr;
  const float* k_norm = nullptr;
  const float* inv_freq = nullptr;
  float eps = 0.0f, scale = 1.0f, softcap = 0.0f;
  double attention_factor = 1.0;
  const Call* next = nullptr;  // the next call that reads a weight, in the order of launches
  const Call* partner = nullptr;  // the attention behind a qk_norm_rope_kv and the other way round, when side by side
  int first = 0;           // lm_head: vocabulary entry of its first output
  bool add = false;        // all_gather, embed
  std::vector<Buf> parts;  // all_gather, moe_combine: by chip, in that chip's arena; width 0 = nothing
  // Mixture of experts. `table` is the choice buffer of experts and combine; `first` the chip's first expert.
  Weight down{};
  int top_k = 0, experts = 0;
  bool renormalise = false;
  std::vector<int> starts;  // first expert of each chip
  // Encoders. `table` is where encoder_attention keeps keys and values, `down` the classifier's second product.
  Index index = Index::ids;
  Pooling pooling = Pooling::mean;
  bool normalise = false;
  const float* down_bias = nullptr;
};

struct Program {
  int index = 0;  // in its calbin
  int rows = 0, lanes = 0, context = 0;
  size_t arena_bytes = 0;
  std::vector<Call> calls;
};

constexpr int kMostTop = 64;    // log-probabilities of a row
constexpr int kHeadRows = 64;   // rows that lm_head takes at once
constexpr int kMostEmit = 8;    // rows of a lane that are sampled

// One lane of a launch: what went in, what came out. Arrays belong to the LaunchData.
struct Lane {
  int past = 0, cur = 0, first_row = 0;
  bool all_logits = false, last_logits = false, failed = false;
  int emit = 0;       // of the lane's last rows, those that a token is sampled after
  bool late = false;  // the mask is still to come; guarded by the device once the launch is queued
  int64_t from_ticket = -1;  // token source: an earlier launch, or -1
  int from_lane = 0;
  SampleArgs sampling{};
  int32_t token[kMostEmit] = {};  // by sampled row; kMostTop ids and log-probabilities each
  float logprob[kMostEmit] = {};
  int n_top = 0;
  int32_t* top_ids = nullptr;
  float* top_logprobs = nullptr;
  std::unique_ptr<float[]> logits;
  int32_t last_token() const { return emit > 0 ? token[emit - 1] : -1; }
  float *embedding = nullptr, *scores = nullptr;  // of an encoder
  int logit_rows() const { return all_logits ? cur : last_logits ? 1 : 0; }
};

struct CallSpan {
  int64_t start_ns = 0, ns = 0;  // from the launch's infer start
  int experts = 0;               // moe_experts: those that had work
};

// Inputs and outputs of one launch; the arrays have room for the calbin's largest program.
struct LaunchData {
  const Program* program = nullptr;
  int lanes = 0, rows = 0;
  std::vector<Lane> lane;
  std::vector<const int32_t*> tables;
  int32_t *tokens = nullptr, *row_lane = nullptr, *positions = nullptr, *types = nullptr;  // per row
  bool profile = false, strict = false;
  std::vector<CallSpan> spans;
  int experts = 0;  // with work in the call that ran last, until its span takes it
  int64_t d2h_ns = 0;
  size_t d2h_bytes = 0;
  std::function<bool()> masks;  // set when lanes are late: waits until their masks are there; false when they will not come
  bool dropped = false;         // they did not come
  std::function<void()> begun;  // called once, by the last thread as it begins
  int nan_lane = -1;            // strict: first lane whose logits hold a NaN
};

// A loaded calbin on this device, or one chip's part of it: the first chip's holds the others.
struct Calbin {
  Calbin(const std::string& params, const KVShape& kv, int vocab);
  int chips() const { return 1 + static_cast<int>(others.size()); }
  Calbin& chip(int index) { return index == 0 ? *this : *others[static_cast<size_t>(index) - 1]; }
  const Calbin& chip(int index) const { return const_cast<Calbin*>(this)->chip(index); }
  size_t block_bytes() const;  // of a KV block over all chips

  MappedFile params;
  KVPool kv;
  int vocab;
  int types = 0, embedding = 0, labels = 0;  // segments known (0 = none is read); values that an encoder gives per text
  std::vector<std::unique_ptr<Program>> programs;
  Region arena;
  std::vector<std::unique_ptr<Calbin>> others;
};

// Work of a call in a launch, for profiles: bytes of weights, activations and KV that it must move, and operations.
struct CallWork {
  int64_t bytes = 0, ops = 0;
};
CallWork call_work(const Call& call, const CallSpan& span, const LaunchData& launch, const KVShape& kv);

class Scratch;
class CallClock;
class ChipLink;
struct PairRows;

// Where the products of experts go, a row per pair.
struct ExpertOut {
  Epilogue epilogue;
  Act act;
  float* data;
  size_t stride;
};

class Executor {
 public:
  Executor(const KernelTable& kernels, ThreadPool& pool);
  ~Executor();

  // Sizes scratch for a calbin: called at load, before its first launch, with no launch running.
  void prepare(const Calbin& calbin);
  size_t scratch_bytes() const;

  // Runs the launch's program. False when `abort` was set between two calls, or when masks did not come. With a link: the program
  // of that chip, whose part of the calbin this is.
  bool run(const Calbin& calbin, LaunchData& launch, const std::atomic<bool>& abort, ChipLink* link = nullptr, int chip = 0);

 private:
  void call(const Calbin& calbin, const Call& c, LaunchData& launch);
  float* at(const Calbin& calbin, const Buf& b) const { return reinterpret_cast<float*>(calbin.arena.data() + b.offset); }
  // Calls [begin, end) on all threads at once: every thread takes its part of each call.
  void run_together(const Calbin& calbin, LaunchData& launch, size_t begin, size_t end, CallClock* clock);
  void part(Member& team, const Calbin& calbin, const Call& c, const LaunchData& launch);
  void look_ahead(Member& team, const Calbin& calbin, const Call* c, const Call* end, const LaunchData& launch) const;
  void touch_keys(const Member& team, const Calbin& calbin, const Call& c, const LaunchData& launch, Ahead& ahead) const;
  void embed(Member& team, const Calbin& calbin, const Call& c, const LaunchData& launch);
  void rope_table(Member& team, const Calbin& calbin, const Call& c, const LaunchData& launch);
  void norm_add(Member& team, const Calbin& calbin, const Call& c, const LaunchData& launch);
  void rope_kv(Member& team, const Calbin& calbin, const Call& c, const LaunchData& launch);
  static bool lanes_apart(const LaunchData& launch);
  bool ropes_by_head(const Call& c, const LaunchData& launch) const;
  void rope_heads(const Calbin& calbin, const Call& c, const LaunchData& launch, int r0, int r1, int h0, int h1) const;
  void linear(const Call& c, const float* x, size_t xs, int rows, float* out, size_t os);
  void linear(Member& team, const Call& c, const float* x, size_t xs, int rows, float* out, size_t os);
  void linear_few(Member& team, const Call& c, const float* x, size_t xs, int rows, float* out, size_t os);
  void linear_quantised(Member& team, const Call& c, const float* x, size_t xs, int rows, float* out, size_t os);
  void linear_float(Member& team, const Call& c, const float* x, size_t xs, int rows, float* out, size_t os);
  void attention(Member& team, const Calbin& calbin, const Call& c, const LaunchData& launch);
  void attention_rows(Member& team, const Calbin& calbin, const Call& c, const LaunchData& launch, const KVView& kv, const int32_t* positions);
  void place_texts(const Calbin& calbin, LaunchData& launch);
  void encoder_attention(Member& team, const Calbin& calbin, const Call& c, const LaunchData& launch);
  void embed_add(Member& team, const Call& c, const int32_t* ids, float* out, int rows);
  void layer_norm(Member& team, const Calbin& calbin, const Call& c, const LaunchData& launch);
  void pool(Member& team, const Calbin& calbin, const Call& c, const LaunchData& launch);
  void classify(const Calbin& calbin, const Call& c, LaunchData& launch);
  void classify_chunk(const Call& c, float* const* to, int count);
  void attention_splits(Member& team, const Calbin& calbin, const Call& c, const LaunchData& launch);
  void lm_head(const Calbin& calbin, const Call& c, LaunchData& launch);
  void head_chunk(const Calbin& calbin, const Call& c, LaunchData& launch, int count);
  void moe_route(const Calbin& calbin, const Call& c, LaunchData& launch);
  void place_pairs(const Call& c, int rows, float* choice);
  void list_pairs(const Call& c, int rows, float* choice);
  void moe_experts(const Calbin& calbin, const Call& c, LaunchData& launch);
  void spread_row(const Call& c, const float* choice, const float* x, int r, const PairRows& to);
  template <class Units, class Prepare>
  void expert_products(Member& team, const Weight& w, const Units& units, const uint8_t* next, int rows, Prepare&& prepare, const ExpertOut& to);
  void moe_combine(const Calbin& calbin, const Call& c, LaunchData& launch);
  void all_gather(const Calbin& calbin, const Call& c, LaunchData& launch);
  bool gather_logits(const Call& c, int vocab, int count);
  bool meet();
  void copy_logits(float softcap, int vocab, LaunchData& launch, int count);
  void sample(const Call& c, int vocab, LaunchData& launch, int count);

  const KernelTable& kernels_;
  ThreadPool& pool_;
  std::unique_ptr<Scratch> scratch_;
  // Of the launch that runs.
  ChipLink* link_ = nullptr;
  const std::atomic<bool>* abort_ = nullptr;
  int chip_ = 0;
  bool halted_ = false, lanes_apart_ = false;
};

}  // namespace calstack
