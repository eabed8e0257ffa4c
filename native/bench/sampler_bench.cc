// The sampler alone, one thread: microseconds per row. Usage: sampler_bench [isa] [vocab]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "calstack/kernels.h"

using namespace calstack;

namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct Bench {
  const KernelTable& kernels;
  std::vector<float> logits, row;
  std::vector<double> scratch;
  std::vector<int32_t> top_ids = std::vector<int32_t>(64);
  std::vector<float> top = std::vector<float>(64);

  void time(const char* what, SampleArgs a) {
    double best = 1e9;
    for (int i = 0; i < 200; ++i) {
      row = logits;
      a.index = static_cast<uint64_t>(i);
      SampleOut out{0, 0.0f, top_ids.data(), top.data()};
      const double t0 = now();
      kernels.sample(row.data(), static_cast<int>(row.size()), 0.0f, a, out, scratch.data());
      best = std::min(best, now() - t0);
    }
    std::printf("%-28s %8.1f us\n", what, best * 1e6);
  }
};

SampleArgs plain(float temperature, int top_k = 0, float top_p = 1.0f, float min_p = 0.0f) {
  SampleArgs a{};
  a.temperature = temperature, a.top_k = top_k, a.top_p = top_p, a.min_p = min_p, a.repetition = 1.0f, a.top_logprobs = -1;
  return a;
}

}  // namespace

int main(int argc, char** argv) {
  const KernelTable* k = kernels_by_name(argc > 1 ? argv[1] : "");
  if (!k) return std::fprintf(stderr, "sampler_bench: no such instruction set on this machine\n"), 2;
  const size_t vocab = argc > 2 ? std::strtoul(argv[2], nullptr, 10) : 49152;
  std::mt19937 rng(1);
  std::normal_distribution<float> normal(0.0f, 3.0f);
  Bench bench{*k, std::vector<float>(vocab), {}, std::vector<double>(2 * vocab)};
  for (float& z : bench.logits) z = normal(rng);
  std::printf("%s, vocabulary %zu\n", k->name, vocab);
  bench.time("greedy", plain(0.0f));
  bench.time("draw, no filter", plain(0.8f));
  bench.time("top-k 40", plain(0.8f, 40));
  bench.time("top-p 0.95", plain(0.8f, 0, 0.95f));
  bench.time("top-p 0.95 at temperature 3", plain(3.0f, 0, 0.95f));
  bench.time("min-p 0.05", plain(0.8f, 0, 1.0f, 0.05f));
  bench.time("top-k 40, top-p, min-p", plain(0.8f, 40, 0.95f, 0.05f));
  SampleArgs a = plain(0.0f);
  const std::vector<uint32_t> mask(vocab / 32 + 1, 0x55555555u);
  a.mask = mask.data();
  bench.time("greedy with a mask", a);
  a = plain(0.0f);
  std::vector<int32_t> history(8000);
  for (auto& id : history) id = static_cast<int32_t>(rng() % vocab);
  a.repetition = 1.1f, a.output = history.data(), a.n_output = static_cast<int>(history.size());
  bench.time("greedy, 8000 ids of history", a);
  a = plain(0.0f);
  a.top_logprobs = 20;
  bench.time("greedy with 20 logprobs", a);
  return 0;
}
