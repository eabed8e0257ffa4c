// What each kernel family gives to the tables. A family source (linear_q.cc, attention.cc, ...) is compiled once per instruction
// set with CALSTACK_ISA set to the namespace below; it defines its fill function there and keeps all else in that namespace's
// unnamed namespace. Code compiled with wider flags must not leave inline functions of another namespace behind (std::min, ...):
// the linker may pick that copy for every caller.
#pragma once
#include "calstack/kernels.h"

// Declares the fill functions of one instruction set; each sets the pointers of its family.
#define CALSTACK_DECLARE_PARTS(isa)                                                                            \
  namespace isa {                                                                                              \
  void fill_norm_quant(KernelTable& t);     /* quant_rows, norm_rows: norm_quant.cc */                         \
  void fill_linear_q(KernelTable& t);       /* linear_q: linear_q.cc */                                        \
  void fill_linear_f(KernelTable& t);       /* linear_f: linear_f.cc */                                        \
  void fill_embed(KernelTable& t);          /* embed_rows: embed.cc */                                         \
  void fill_rope_kv(KernelTable& t);        /* rope_table, qk_norm_rope_kv: rope_kv.cc */                      \
  void fill_attention(KernelTable& t);      /* attention, attention_split, attention_merge: attention.cc */    \
  void fill_moe(KernelTable& t);            /* moe_route, moe_combine: moe.cc */                               \
  void fill_encoder(KernelTable& t);        /* layer_norm_rows, pool_rows: encoder.cc */                       \
  void fill_sampler(KernelTable& t);        /* sample: sampler.cc */                                           \
  CeilingLoops ceiling_loops();             /* ceiling_loops.cc */                                             \
  }

namespace calstack {

// What ceilings.cc times. Results are returned so that no loop is left out.
struct CeilingLoops {
  int (*products)(long loops);
  double operations;  // of one loop
  int (*read)(const char* p, size_t bytes, size_t ahead);
};

// Bytes, about, that prefetches run ahead of a stream of weights on this CPU; 0: it streams fastest without.
size_t stream_ahead();

CALSTACK_DECLARE_PARTS(reference)  // native/src/ref/ref_*.cc
CALSTACK_DECLARE_PARTS(portable)
CALSTACK_DECLARE_PARTS(avx2)
CALSTACK_DECLARE_PARTS(avx512)

namespace avx2_vnni {
CeilingLoops ceiling_loops();
void fill_linear_q(KernelTable& t);  // the other families of such a CPU are those of avx2
}

namespace avx512_bf16 {
void fill_attention(KernelTable& t);  // the other families of such a CPU are those of avx512
}

}  // namespace calstack

#undef CALSTACK_DECLARE_PARTS
