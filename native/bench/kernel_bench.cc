// Microbenchmarks of the linear kernels: GOP/s and GB/s, and their share of ceilings measured in the same run.
//   kernel_bench [--isa NAME] [--threads N] [--only TEXT] [--rows N]
// Ceilings: the int8 peak is a loop of products over registers; the read limit is a prefetching read of a buffer much larger than the
// caches, split over the threads. A GEMV runs over as many copies of its weights as that buffer holds, so that it finds them in memory.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "calstack/ceilings.h"
#include "calstack/kernels.h"
#include "packed.h"

namespace {

using namespace calstack;

constexpr size_t kStream = 96u << 20;  // bytes a GEMV passes over, about a whole model

struct Shape {
  const char* name;
  WFmt format;
  bool minimum;
  int n, k;
  Epilogue ep;
};

constexpr Shape kShapes[] = {
    {"qkv", WFmt::w4a8, true, 960, 576, Epilogue::store},         {"o", WFmt::w4a8, true, 576, 576, Epilogue::residual},
    {"gate_up", WFmt::w4a8, true, 3072, 576, Epilogue::gated},    {"down", WFmt::w4a8, true, 576, 1536, Epilogue::residual},
    {"head", WFmt::w8a8, false, 49152, 576, Epilogue::store},     {"qkv_no_min", WFmt::w4a8, false, 960, 576, Epilogue::store},
    {"gate_up_no_min", WFmt::w4a8, false, 3072, 576, Epilogue::gated}, {"down_no_min", WFmt::w4a8, false, 576, 1536, Epilogue::residual},
    {"big", WFmt::w4a8, true, 4096, 2048, Epilogue::store},       {"big_no_min", WFmt::w4a8, false, 4096, 2048, Epilogue::store},
    {"big_w8", WFmt::w8a8, false, 4096, 2048, Epilogue::store},
};

struct Aligned {
  void operator()(void* p) const { std::free(p); }
};
template <class T> using Buffer = std::unique_ptr<T[], Aligned>;

template <class T> Buffer<T> buffer(size_t n) {
  const size_t bytes = (n * sizeof(T) + 4095) / 4096 * 4096;
  void* p = std::aligned_alloc(4096, bytes);
  if (!p) std::abort();
  std::memset(p, 0, bytes);
  return Buffer<T>(static_cast<T*>(p));
}

// A weight with random codes, and scales and minima of 1/64 and -1/8; `copies` of it, one behind the other.
Buffer<uint8_t> random_weight(const Weight& w, size_t copies) {
  const size_t groups = (size_t)(w.n / kLane) * (size_t)(w.k / w.group) * copies, bytes = group_bytes(w), codes = code_bytes(w);
  auto data = buffer<uint8_t>(groups * bytes + 8192);  // prefetches run past the end
  uint64_t s = 88172645463325252u;
  for (size_t g = 0; g < groups; ++g) {
    uint8_t* p = data.get() + g * bytes;
    for (size_t i = 0; i < codes; i += 8) {
      s ^= s << 13, s ^= s >> 7, s ^= s << 17;
      std::memcpy(p + i, &s, 8);
    }
    for (size_t i = 0; i < bytes - codes; i += 2) {
      const uint16_t h = i < 32 ? 0x2400 : 0xb000;
      std::memcpy(p + codes + i, &h, 2);
    }
  }
  return data;
}

struct Activations {
  Buffer<float> x;
  Buffer<int8_t> codes;
  Buffer<float> scale, asum;
  Buffer<int32_t> isum;
  QuantRows q;
  Activations(const KernelTable& t, int rows, int k, int group) {
    const size_t n = (size_t)rows * (size_t)k, g = n / (size_t)group;
    x = buffer<float>(n), codes = buffer<int8_t>(n), scale = buffer<float>(g), asum = buffer<float>(g), isum = buffer<int32_t>(g);
    for (size_t i = 0; i < n; ++i) x[i] = (float)((int)(i * 2654435761u >> 16 & 0xffff) - 32768) / 16384.0f;
    q = {codes.get(), scale.get(), asum.get(), isum.get(), k, group};
    t.quant_rows(x.get(), (size_t)k, NormSpec{nullptr, 0.0f}, q, 0, rows);
  }
};

struct Result {
  double seconds, ops, bytes;
};

// One call of a linear layer on all threads, blocks cut evenly, as often as fills about 50 ms; the best of several tries.
Result time_linear(const KernelTable& t, const Shape& s, int rows, int threads) {
  Weight w{nullptr, s.format, s.n, s.k, 32, s.minimum};
  const int blocks = s.n / kLane, step = s.ep == Epilogue::gated ? 2 : 1;
  const size_t bytes = block_bytes(w) * (size_t)blocks;
  const size_t copies = rows <= 16 ? std::max<size_t>(1, kStream / bytes) : 1;
  const auto data = random_weight(w, copies);
  const Activations a(t, rows, s.k, 32);
  const size_t os = (size_t)(s.ep == Epilogue::gated ? s.n / 2 : s.n);
  auto out = buffer<float>(os * (size_t)rows);
  const double ops = 2.0 * rows * s.n * s.k;
  const int repeats = rows <= 16 ? 3 : (int)std::clamp(4e10 * threads / ops, 1.0, 2000.0);
  const auto work = [&](int thread) {
    Weight mine = w;
    const int nb0 = blocks / step * thread / threads * step, nb1 = blocks / step * (thread + 1) / threads * step;
    for (int r = 0; r < repeats; ++r)
      for (size_t c = 0; c < copies; ++c) {
        mine.data = data.get() + c * bytes;
        t.linear_q(mine, a.q, rows, nullptr, s.ep, Act::silu, out.get(), os, nb0, nb1);
      }
  };
  const double calls = (double)repeats * (double)copies;
  return {best_of(5, threads, work) / calls, ops, (double)bytes};
}

// One line; the read limit is measured around every run that streams weights, because it moves with the machine's neighbours.
void print_row(const char* name, int rows, int threads, const Result& r, double peak, double read) {
  const double gops = r.ops / r.seconds / 1e9, gbs = r.bytes / r.seconds / 1e9;
  std::printf("%-16s %5d %2d %10.2f %9.1f %6.1f%% %8.1f", name, rows, threads, r.seconds * 1e6, gops, 100 * gops / peak, gbs);
  if (read > 0) std::printf(" %6.1f%% of %.1f", 100 * gbs / read, read);
  std::printf("\n");
}

void bench_shape(const KernelTable& t, const Shape& s, int rows, int threads, double peak, const ReadCeiling& ceiling) {
  const bool streams = rows <= 16;
  double read = streams ? ceiling.gbs(t, threads) : 0;
  const Result r = time_linear(t, s, rows, threads);
  if (streams) read = std::max(read, ceiling.gbs(t, threads));
  print_row(s.name, rows, threads, r, peak, read);
}

void time_rows_kernels(const KernelTable& t) {
  auto weight = buffer<float>(1536);
  std::fill_n(weight.get(), 1536, 1.0f);
  for (int k : {576, 1536})
    for (bool normed : {true, false}) {
      Activations a(t, 128, k, 32);
      const NormSpec norm{normed ? weight.get() : nullptr, 1e-5f};
      const auto run = [&](int) {
        for (int i = 0; i < 50; ++i) t.quant_rows(a.x.get(), (size_t)k, norm, a.q, 0, 128);
      };
      const double s = best_of(6, 1, run) / 50 / 128;
      std::printf("quant_rows k=%-5d norm=%d %8.1f ns per row, %5.2f GB/s\n", k, normed, s * 1e9, 4.0 * k / s / 1e9);
    }
}

struct Options {
  std::string isa, only;
  std::vector<int> rows{1, 2, 4, 8, 16, 128, 512};
  int threads = (int)std::thread::hardware_concurrency();
};

Options parse(int argc, char** argv) {
  Options o;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string key = argv[i];
    if (key == "--isa") o.isa = argv[i + 1];
    if (key == "--only") o.only = argv[i + 1];
    if (key == "--rows") o.rows = {std::max(1, std::atoi(argv[i + 1]))};
    if (key == "--threads") o.threads = std::max(1, std::atoi(argv[i + 1]));
  }
  return o;
}

}  // namespace

int main(int argc, char** argv) {
  const Options o = parse(argc, argv);
  const KernelTable* t = kernels_by_name(o.isa.c_str());
  if (!t) {
    std::fprintf(stderr, "kernel_bench: no instruction set '%s' here\n", o.isa.c_str());
    return 2;
  }
  if (o.only.empty()) time_rows_kernels(*t);
  const ReadCeiling ceiling(kStream);
  for (int threads : {1, o.threads}) {
    const double peak = int8_peak_gops(*t, threads);
    std::printf("\n%s, %d threads: int8 peak %.0f GOP/s, read limit %.1f GB/s\n", t->name, threads, peak, ceiling.gbs(*t, threads));
    std::printf("%-16s %5s %2s %10s %9s %7s %8s %s\n", "layer", "rows", "t", "us", "GOP/s", "peak", "GB/s", "of the read limit");
    for (const Shape& s : kShapes)
      if (std::string(s.name).find(o.only) != std::string::npos)
        for (int rows : o.rows)
          if (s.n < 40000 || rows <= 128) bench_shape(*t, s, rows, threads, peak, ceiling);
    if (threads == o.threads) break;
  }
}
