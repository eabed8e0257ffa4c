// One table per instruction set, put together from the families, and the choice at run time.
#include <cstring>

#if defined(CALSTACK_X86)
#include <cpuid.h>
#endif

#include "kernel_parts.h"

namespace calstack {
namespace {

using Fill = void (*)(KernelTable&);

template <size_t n> KernelTable assemble(const char* name, const Fill (&fills)[n]) {
  KernelTable t{};
  t.name = name;
  for (Fill fill : fills) fill(t);
  return t;
}

#define CALSTACK_FAMILIES(isa)                                                                                       \
  isa::fill_norm_quant, isa::fill_linear_q, isa::fill_linear_f, isa::fill_embed, isa::fill_rope_kv, isa::fill_attention, \
      isa::fill_moe, isa::fill_encoder, isa::fill_sampler

#if defined(CALSTACK_X86)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); }
bool has_avx_vnni() { return has_avx2() && __builtin_cpu_supports("avxvnni"); }
bool has_avx512_vnni() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}

// Zen 3 and 4 (AMD family 25). A core of theirs has 24 misses of its first cache in flight, which bounds what prefetch instructions bring
// to 24 lines a memory latency; its hardware prefetcher, left alone, has the second cache's larger number. Measured on Zen 4: 24.6 GB/s
// a core without, 18.9 with them. Zen 5 gains from them.
bool is_amd_family_25() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid(0, &eax, &ebx, &ecx, &edx) || ebx != signature_AMD_ebx) return false;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && ((eax >> 8 & 0xf) + (eax >> 20 & 0xff)) == 25;
}

bool has_avx512_bf16() { return has_avx512_vnni() && __builtin_cpu_supports("avx512bf16"); }
#endif

}  // namespace

size_t stream_ahead() {
#if defined(CALSTACK_X86)
  static const size_t bytes = is_amd_family_25() ? 0 : 16384;
  return bytes;
#else
  return 16384;
#endif
}

const KernelTable* kernels_reference() {
  static const KernelTable table = assemble("reference", {CALSTACK_FAMILIES(reference)});
  return &table;
}

const KernelTable* kernels_portable() {
  static const KernelTable table = assemble("portable", {CALSTACK_FAMILIES(portable)});
  return &table;
}

#if defined(CALSTACK_X86)
const KernelTable* kernels_avx2() {
  static const KernelTable table = assemble("avx2", {CALSTACK_FAMILIES(avx2)});
  return has_avx2() ? &table : nullptr;
}

const KernelTable* kernels_avx2_vnni() {
  static const KernelTable table = assemble("avx2_vnni", {CALSTACK_FAMILIES(avx2), avx2_vnni::fill_linear_q});
  return has_avx_vnni() ? &table : nullptr;
}

const KernelTable* kernels_avx512_vnni() {
  static const KernelTable table = assemble("avx512_vnni", {CALSTACK_FAMILIES(avx512)});
  return has_avx512_vnni() ? &table : nullptr;
}

const KernelTable* kernels_avx512_bf16() {
  static const KernelTable table = assemble("avx512_bf16", {CALSTACK_FAMILIES(avx512), avx512_bf16::fill_attention});
  return has_avx512_bf16() ? &table : nullptr;
}
#else
const KernelTable* kernels_avx2() { return nullptr; }
const KernelTable* kernels_avx2_vnni() { return nullptr; }
const KernelTable* kernels_avx512_vnni() { return nullptr; }
const KernelTable* kernels_avx512_bf16() { return nullptr; }
#endif

const KernelTable* kernels_by_name(const char* name) {
  using Get = const KernelTable* (*)();
  const Get best_first[] = {kernels_avx512_bf16, kernels_avx512_vnni, kernels_avx2_vnni, kernels_avx2, kernels_portable, kernels_reference};
  for (Get get : best_first) {
    const KernelTable* table = get();
    if (table && (*name == '\0' || std::strcmp(name, table->name) == 0)) return table;
  }
  return nullptr;
}

}  // namespace calstack
