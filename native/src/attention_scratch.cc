#include "attention_scratch.h"

#include "calstack/kernels.h"

namespace calstack {

size_t attention_scratch_bytes(const AttnShape&) { return sizeof(AttentionScratch) + alignof(AttentionScratch); }

}  // namespace calstack
