// The sampler of one row. Greedy is two passes over the logits; a draw without filters adds one; filters look at the few highest.
#include "kernel_parts.h"
#include "sampler_select.h"
#include "simd/f64.h"
#include "simd/math.h"

namespace calstack {
namespace CALSTACK_ISA {
namespace {

constexpr int kSumBlock = 256;
constexpr int kFirstRank = 256;  // entries ranked at first for top-p: whole sum blocks

CALSTACK_INLINE int smaller(int a, int b) { return a < b ? a : b; }

// --- adjusting the logits ------------------------------------------------------------------------------------------------

CALSTACK_INLINE Mask16 is_nan(F32x16 x) {
  return less(I32x16::broadcast(0x7f800000), as_i32(x) & I32x16::broadcast(0x7fffffff));
}

void cap_logits(float* z, int vocab, float softcap) {
  const F32x16 cap = F32x16::broadcast(softcap);
  for (int i = 0; i < vocab; i += 16) {
    const int lanes = smaller(16, vocab - i);
    const F32x16 x = F32x16::load_first(z + i, lanes);
    select(is_nan(x), x, cap * tanh(x / cap)).store_first(z + i, lanes);
  }
}

template <class F>
CALSTACK_INLINE void each_id(const int32_t* ids, int n, int vocab, F f) {
  for (int i = 0; i < n; ++i)
    if (ids[i] >= 0 && ids[i] < vocab) f(ids[i]);
}

// Each id of the history once, whatever its count; `counts` is only touched at those ids.
void penalise(float* z, int vocab, const SampleArgs& a, int32_t* counts) {
  const auto clear = [&](int32_t id) { counts[id] = 0; };
  const auto apply = [&](int32_t id) {
    if (counts[id] < 0) return;
    float v = z[id] > 0.0f ? z[id] / a.repetition : z[id] * a.repetition;
    if (counts[id] > 0) v = __builtin_fmaf(-static_cast<float>(counts[id]), a.frequency, v) - a.presence;
    z[id] = v;
    counts[id] = -1;
  };
  each_id(a.prompt, a.n_prompt, vocab, clear);
  each_id(a.output, a.n_output, vocab, clear);
  each_id(a.output, a.n_output, vocab, [&](int32_t id) { ++counts[id]; });
  each_id(a.prompt, a.n_prompt, vocab, apply);
  each_id(a.output, a.n_output, vocab, apply);
}

CALSTACK_INLINE Mask16 lanes_of(uint32_t word) {
  alignas(64) static constexpr int32_t kBit[16] = {1,      2,      4,      8,      0x10,   0x20,   0x40,   0x80,
                                                   0x100,  0x200,  0x400,  0x800,  0x1000, 0x2000, 0x4000, 0x8000};
  return less(I32x16::zero(), I32x16::broadcast(static_cast<int32_t>(word)) & I32x16::load(kBit));
}

void mask_logits(float* z, int vocab, const uint32_t* mask) {
  const F32x16 lowest = F32x16::broadcast(kMinusInf);
  for (int i = 0; i < vocab; i += 16) {
    const int lanes = smaller(16, vocab - i);
    select(lanes_of(mask[i / 32] >> (i % 32) & 0xffff), F32x16::load_first(z + i, lanes), lowest).store_first(z + i, lanes);
  }
}

void adjust(float* z, int vocab, float softcap, const SampleArgs& a, int32_t* counts) {
  if (softcap != 0.0f) cap_logits(z, vocab, softcap);
  for (int i = 0; i < a.n_bias; ++i)
    if (a.bias_ids[i] >= 0 && a.bias_ids[i] < vocab) z[a.bias_ids[i]] += a.bias[i];
  if (a.repetition != 1.0f || a.frequency != 0.0f || a.presence != 0.0f) penalise(z, vocab, a, counts);
  if (a.mask) mask_logits(z, vocab, a.mask);
}

// --- highest value -------------------------------------------------------------------------------------------------------

struct Highest {
  float z;
  int id;  // -1: NaN, or nothing finite
};

int first_reaching(const float* z, int begin, int vocab, float value) {
  const F32x16 wanted = F32x16::broadcast(value);
  for (int i = begin; i < vocab; i += 16) {
    const uint32_t reach = ~bits(less(load_or_lowest(z + i, vocab - i), wanted)) & 0xffff;
    if (reach) return i + __builtin_ctz(reach);
  }
  return -1;
}

Highest highest(const float* z, int vocab) {
  Highest best{kMinusInf, -1};
  uint32_t nan = 0;
  int best_block = 0;
  for (int block = 0; block < vocab; block += kSumBlock) {
    F32x16 top = F32x16::broadcast(kMinusInf);
    for (int i = block; i < smaller(block + kSumBlock, vocab); i += 16) {
      const F32x16 x = load_or_lowest(z + i, vocab - i);
      nan |= bits(is_nan(x));
      top = max(x, top);
    }
    if (bits(less(F32x16::broadcast(best.z), top)) == 0) continue;
    best.z = max_lane(top);
    best_block = block;
  }
  if (nan || best.z == kMinusInf || best.z == -kMinusInf) return best;
  best.id = first_reaching(z, best_block, vocab, best.z);
  return best;
}

// --- sums of e -----------------------------------------------------------------------------------------------------------

// e = exp((z - zmax) / temperature). Dividing by 1 is exact, so log-probabilities use it too.
struct Weigh {
  F32x16 zmax, temperature;
  Weigh(float top, float t) : zmax(F32x16::broadcast(top)), temperature(F32x16::broadcast(t)) {}
  CALSTACK_INLINE F32x16 operator()(F32x16 z) const { return exp((z - zmax) / temperature); }
};

// Writes e of n values (padded with 0 to whole vectors).
void weigh_all(const Weigh& weigh, const float* z, int n, float* e) {
  for (int i = 0; i < n; i += 16) {
    const int lanes = smaller(16, n - i);
    select(first_lanes(lanes), weigh(F32x16::load_first(z + i, lanes)), F32x16::zero()).store_first(e + i, lanes);
  }
}

double block_sum(const float* e, int n) {
  F64Lanes sum;
  for (int i = 0; i < n; i += 16) sum.add(F32x16::load_first(e + i, smaller(16, n - i)));
  return tree_sum(sum);
}

double total_of(const float* e, int n) {
  double sum = 0.0;
  for (int b = 0; b < n; b += kSumBlock) sum += block_sum(e + b, smaller(kSumBlock, n - b));
  return sum;
}

// The block sum over all ids in id order without keeping e; `inclusive`, if given, gets the running sum of each block.
double total_of_row(const Weigh& weigh, const float* z, int vocab, double* inclusive) {
  double sum = 0.0;
  for (int block = 0; block < vocab; block += kSumBlock) {
    F64Lanes lanes;
    for (int i = block; i < smaller(block + kSumBlock, vocab); i += 16) lanes.add(weigh(load_or_lowest(z + i, vocab - i)));
    sum += tree_sum(lanes);
    if (inclusive) *inclusive++ = sum;
  }
  return sum;
}

CALSTACK_INLINE int last_above_zero(const float* e, int n) {
  int i = n - 1;
  while (i > 0 && !(e[i] > 0.0f)) --i;
  return i < 0 ? 0 : i;
}

struct Reaches {
  double target;
  bool operator()(double sum) const { return sum >= target; }
};
struct Exceeds {
  double target;
  bool operator()(double sum) const { return sum > target; }
};

template <class Passes>
int cut_block(const float* e, int n, double before, Passes passes) {
  for (int i = 0; i < n; ++i) {
    before += static_cast<double>(e[i]);
    if (passes(before)) return i;
  }
  return last_above_zero(e, n);
}

// Index of the cut, or -1 when no block passes.
template <class Passes>
int cut(const float* e, int n, Passes passes) {
  double before = 0.0;
  for (int b = 0; b < n; b += kSumBlock) {
    const int size = smaller(kSumBlock, n - b);
    const double after = before + block_sum(e + b, size);
    if (passes(after)) return b + cut_block(e + b, size, before, passes);
    before = after;
  }
  return -1;
}

// --- drawing -------------------------------------------------------------------------------------------------------------

CALSTACK_INLINE uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

double uniform(const SampleArgs& a) {
  const uint64_t h = mix(mix(mix(a.seed) ^ (a.choice + 0x9e3779b97f4a7c15u)) + a.index * 0xd1342543de82ef95u);
  return static_cast<double>(h >> 11) * 0x1p-53;
}

// The row under way: scratch is two arrays of vocab items.
struct Row {
  const float* z;
  int vocab;
  Item *items, *other;
  const SampleArgs& args;
  Weigh weigh;
};

// The ranked entries in use: ids in rank order and their e, both in what the sort left free.
struct Ranked {
  int n;
  const int32_t* ids;
  float* e;
};

int draw_from_all(const Row& r) {
  double* inclusive = reinterpret_cast<double*>(r.items);
  const Exceeds passes{uniform(r.args) * total_of_row(r.weigh, r.z, r.vocab, inclusive)};
  alignas(64) float e[kSumBlock];
  int block = 0;
  const int blocks = (r.vocab + kSumBlock - 1) / kSumBlock;
  while (block < blocks && !passes(inclusive[block])) ++block;
  if (block < blocks) {
    const int begin = block * kSumBlock, n = smaller(kSumBlock, r.vocab - begin);
    weigh_all(r.weigh, r.z + begin, n, e);
    return begin + cut_block(e, n, block > 0 ? inclusive[block - 1] : 0.0, passes);
  }
  for (block = blocks - 1; block >= 0; --block) {
    const int begin = block * kSumBlock, n = smaller(kSumBlock, r.vocab - begin);
    weigh_all(r.weigh, r.z + begin, n, e);
    const int i = last_above_zero(e, n);
    if (e[i] > 0.0f) return begin + i;
  }
  return 0;
}

Ranked ranked(const Row& r, int count) {
  float* e = reinterpret_cast<float*>(r.other);
  int32_t* ids = reinterpret_cast<int32_t*>(e + r.vocab);
  for (int i = 0; i < count; ++i) {
    ids[i] = id_of(r.items[i]);
    e[i] = r.z[ids[i]];
  }
  weigh_all(r.weigh, e, count, e);
  return {count, ids, e};
}

// The list that top-p leaves when nothing was kept before: more and more of the ranking, until whole blocks pass the target.
Ranked rank_by_mass(const Row& r) {
  const Reaches passes{static_cast<double>(r.args.top_p) * total_of_row(r.weigh, r.z, r.vocab, nullptr)};
  for (int wanted = kFirstRank;; wanted *= 8) {
    const bool all = wanted >= r.vocab / 4;
    const int count = rank_top(r.z, r.vocab, all ? r.vocab : wanted, r.items, r.other);
    Ranked list = ranked(r, count);
    const bool complete = all || count < wanted;
    const int whole = complete ? count : count / kSumBlock * kSumBlock;
    const int at = cut(list.e, whole, passes);
    if (at >= 0 || complete) return {at >= 0 ? at + 1 : last_above_zero(list.e, count) + 1, list.ids, list.e};
  }
}

// Only min-p: everything that reaches it.
Ranked rank_by_share(const Row& r) {
  const F32x16 least = F32x16::broadcast(r.args.min_p), lowest = F32x16::broadcast(kMinusInf);
  int n = 0;
  for (int i = 0; i < r.vocab; i += 16) {
    const F32x16 z = load_or_lowest(r.z + i, r.vocab - i);
    uint32_t keep = ~bits(less(r.weigh(z), least)) & bits(less(lowest, z));
    for (; keep; keep &= keep - 1) {
      const int id = i + __builtin_ctz(keep);
      r.items[n++] = item_of(r.z[id], id);
    }
  }
  sort_items(r.items, r.other, n);
  return ranked(r, n);
}

Ranked candidates(const Row& r, bool top_k, bool top_p) {
  if (!top_k) return top_p ? rank_by_mass(r) : rank_by_share(r);
  Ranked list = ranked(r, smaller(rank_top(r.z, r.vocab, r.args.top_k, r.items, r.other), r.args.top_k));
  if (!top_p) return list;
  const int at = cut(list.e, list.n, Reaches{static_cast<double>(r.args.top_p) * total_of(list.e, list.n)});
  list.n = (at >= 0 ? at : last_above_zero(list.e, list.n)) + 1;
  return list;
}

void keep_shares(Ranked& list, float min_p) {
  int32_t* ids = const_cast<int32_t*>(list.ids);
  int kept = 0;
  for (int i = 0; i < list.n; ++i)
    if (list.e[i] >= min_p) {
      ids[kept] = ids[i];
      list.e[kept++] = list.e[i];
    }
  list.n = kept;
}

int draw(const Row& r, int first) {
  const SampleArgs& a = r.args;
  const bool top_k = a.top_k > 0 && a.top_k < r.vocab, top_p = a.top_p < 1.0f, min_p = a.min_p > 0.0f;
  if (!top_k && !top_p && !min_p) return draw_from_all(r);
  Ranked list = candidates(r, top_k, top_p);
  if (min_p) keep_shares(list, a.min_p);
  if (list.n == 0) return first;
  const int at = cut(list.e, list.n, Exceeds{uniform(a) * total_of(list.e, list.n)});
  return list.ids[at >= 0 ? at : last_above_zero(list.e, list.n)];
}

// --- log-probabilities ---------------------------------------------------------------------------------------------------

void log_probabilities(const Row& r, float zmax, int n, SampleOut& out) {
  const double log_sum = __builtin_log(total_of_row(Weigh(zmax, 1.0f), r.z, r.vocab, nullptr));
  const auto logprob = [&](int id) { return static_cast<float>(static_cast<double>(r.z[id] - zmax) - log_sum); };
  out.logprob = logprob(out.token);
  if (n <= 0) return;
  const int finite = smaller(rank_top(r.z, r.vocab, n, r.items, r.other), n);
  int i = 0;
  for (; i < finite; ++i) out.top_ids[i] = id_of(r.items[i]);
  for (int id = 0; i < n && id < r.vocab; ++id)
    if (r.z[id] == kMinusInf) out.top_ids[i++] = id;
  for (int j = 0; j < i; ++j) out.top_logprobs[j] = logprob(out.top_ids[j]);
  for (; i < n; ++i) {
    out.top_ids[i] = -1;
    out.top_logprobs[i] = kMinusInf;
  }
}

void no_token(const SampleArgs& a, SampleOut& out) {
  out.token = -1;
  for (int i = 0; i < a.top_logprobs; ++i) {
    out.top_ids[i] = -1;
    out.top_logprobs[i] = kMinusInf;
  }
}

void sample(float* logits, int vocab, float softcap, const SampleArgs& a, SampleOut& out, void* scratch) {
  Item* items = static_cast<Item*>(scratch);
  adjust(logits, vocab, softcap, a, static_cast<int32_t*>(scratch));
  out.logprob = 0.0f;
  const Highest top = highest(logits, vocab);
  if (top.id < 0) return no_token(a, out);
  const Row row{logits, vocab, items, items + vocab, a, Weigh(top.z, a.temperature)};
  out.token = a.temperature >= 1e-6f ? draw(row, top.id) : top.id;
  if (a.top_logprobs >= 0) log_probabilities(row, top.z, a.top_logprobs, out);
}

}  // namespace

void fill_sampler(KernelTable& t) { t.sample = sample; }

}  // namespace CALSTACK_ISA
}  // namespace calstack
