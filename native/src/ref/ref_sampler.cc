// Scalar reference of the sampler: sorts everything, keeps whole lists.
#include <algorithm>
#include <unordered_map>
#include <vector>

#include "../kernel_parts.h"
#include "ref_math.h"

namespace calstack::reference {
namespace {

constexpr size_t kSumBlock = 256;

struct Candidate {
  int32_t id;
  float e;
};
using Candidates = std::vector<Candidate>;

bool in_vocab(int32_t id, int vocab) { return id >= 0 && id < vocab; }

void penalise(float* z, int vocab, const SampleArgs& a) {
  std::unordered_map<int32_t, int64_t> output_count;  // of every id in the history
  for (int i = 0; i < a.n_prompt; ++i)
    if (in_vocab(a.prompt[i], vocab)) output_count.emplace(a.prompt[i], 0);
  for (int i = 0; i < a.n_output; ++i)
    if (in_vocab(a.output[i], vocab)) ++output_count.emplace(a.output[i], 0).first->second;
  for (const auto& [id, count] : output_count) {
    float& v = z[id];
    v = v > 0.0f ? v / a.repetition : v * a.repetition;
    if (count > 0) v = std::fma(-static_cast<float>(count), a.frequency, v) - a.presence;
  }
}

void adjust(float* z, int vocab, float softcap, const SampleArgs& a) {
  if (softcap != 0.0f)
    for (int i = 0; i < vocab; ++i) z[i] = soft_cap(z[i], softcap);
  for (int i = 0; i < a.n_bias; ++i)
    if (in_vocab(a.bias_ids[i], vocab)) z[a.bias_ids[i]] += a.bias[i];
  penalise(z, vocab, a);
  for (int i = 0; a.mask && i < vocab; ++i)
    if (!(a.mask[i / 32] >> (i % 32) & 1)) z[i] = kMinusInf;
}

// All ids, by (z descending, id ascending).
std::vector<int32_t> ranking(const float* z, int vocab) {
  std::vector<int32_t> ids(static_cast<size_t>(vocab));
  for (int i = 0; i < vocab; ++i) ids[static_cast<size_t>(i)] = i;
  std::stable_sort(ids.begin(), ids.end(), [z](int32_t a, int32_t b) { return z[a] > z[b]; });
  return ids;
}

double block_sum(const Candidates& list, size_t begin) {
  double acc[16] = {};
  for (size_t i = begin; i < std::min(begin + kSumBlock, list.size()); ++i) acc[(i - begin) % 16] += static_cast<double>(list[i].e);
  return lane_tree(acc);
}

double total(const Candidates& list) {
  double sum = 0.0;
  for (size_t b = 0; b < list.size(); b += kSumBlock) sum += block_sum(list, b);
  return sum;
}

size_t last_above_zero(const Candidates& list, size_t begin, size_t end) {
  for (size_t i = end; i > begin; --i)
    if (list[i - 1].e > 0.0f) return i - 1;
  return begin;
}

template <class Passes>
size_t cut(const Candidates& list, Passes passes) {
  double before = 0.0;
  for (size_t b = 0; b < list.size(); b += kSumBlock) {
    const double after = before + block_sum(list, b);
    if (passes(after)) {
      const size_t end = std::min(b + kSumBlock, list.size());
      for (size_t i = b; i < end; ++i) {
        before += static_cast<double>(list[i].e);
        if (passes(before)) return i;
      }
      return last_above_zero(list, b, end);
    }
    before = after;
  }
  return last_above_zero(list, 0, list.size());
}

uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

double uniform(const SampleArgs& a) {
  const uint64_t h = mix(mix(mix(a.seed) ^ (a.choice + 0x9e3779b97f4a7c15u)) + a.index * 0xd1342543de82ef95u);
  return static_cast<double>(h >> 11) * 0x1p-53;
}

Candidates candidates(const float* z, int vocab, float zmax, const SampleArgs& a) {
  const auto e = [&](int32_t id) { return exp_f32((z[id] - zmax) / a.temperature); };
  const bool top_k = a.top_k > 0 && a.top_k < vocab, top_p = a.top_p < 1.0f, min_p = a.min_p > 0.0f;
  Candidates all, list;
  for (int32_t id = 0; id < vocab; ++id) all.push_back({id, e(id)});
  if (!top_k && !top_p && !min_p) return all;
  for (int32_t id : ranking(z, vocab)) list.push_back(all[static_cast<size_t>(id)]);
  if (top_k) list.resize(static_cast<size_t>(a.top_k));
  if (top_p) {
    const double target = static_cast<double>(a.top_p) * total(top_k ? list : all);
    list.resize(cut(list, [target](double sum) { return sum >= target; }) + 1);
  }
  if (min_p) list.erase(std::remove_if(list.begin(), list.end(), [&](const Candidate& c) { return !(c.e >= a.min_p); }), list.end());
  return list;
}

int32_t draw(const Candidates& list, const SampleArgs& a) {
  const double target = uniform(a) * total(list);
  return list[cut(list, [target](double sum) { return sum > target; })].id;
}

void log_probabilities(const float* z, int vocab, float zmax, int n, SampleOut& out) {
  Candidates all;
  for (int32_t id = 0; id < vocab; ++id) all.push_back({id, exp_f32(z[id] - zmax)});
  const double log_sum = std::log(total(all));
  const auto logprob = [&](int32_t id) { return static_cast<float>(static_cast<double>(z[id] - zmax) - log_sum); };
  out.logprob = logprob(out.token);
  const std::vector<int32_t> ids = n > 0 ? ranking(z, vocab) : std::vector<int32_t>{};
  for (int i = 0; i < n; ++i) {
    out.top_ids[i] = i < vocab ? ids[static_cast<size_t>(i)] : -1;
    out.top_logprobs[i] = i < vocab ? logprob(out.top_ids[i]) : kMinusInf;
  }
}

void no_token(const SampleArgs& a, SampleOut& out) {
  out.token = -1;
  for (int i = 0; i < a.top_logprobs; ++i) out.top_ids[i] = -1, out.top_logprobs[i] = kMinusInf;
}

void sample(float* z, int vocab, float softcap, const SampleArgs& a, SampleOut& out, void*) {
  adjust(z, vocab, softcap, a);
  out.logprob = 0.0f;
  float zmax = kMinusInf;
  bool nan = false;
  for (int i = 0; i < vocab; ++i) {
    nan = nan || z[i] != z[i];
    zmax = std::max(zmax, z[i]);
  }
  if (nan || !std::isfinite(zmax)) return no_token(a, out);
  if (!(a.temperature >= 1e-6f)) {
    out.token = static_cast<int32_t>(std::find(z, z + vocab, zmax) - z);
  } else {
    const Candidates list = candidates(z, vocab, zmax, a);
    out.token = list.empty() ? static_cast<int32_t>(std::find(z, z + vocab, zmax) - z) : draw(list, a);
  }
  if (a.top_logprobs >= 0) log_probabilities(z, vocab, zmax, a.top_logprobs, out);
}

}  // namespace

void fill_sampler(KernelTable& t) { t.sample = sample; }

}  // namespace calstack::reference
