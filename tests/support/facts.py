"""Small calbin facts for scheduler and engine tests."""

from __future__ import annotations

from calstack.runtime.facts import CalbinFacts, SubmodelFacts
from calstack.specs import Role


def submodel(role: Role, batch: int, q_len: int, context: int, rows: int = 0) -> SubmodelFacts:
    key = f"{role}.b{batch}.q{q_len}.c{context}.paged"
    return SubmodelFacts(key=key, role=role, batch=batch, q_len=q_len, context=context, rows=rows or batch * q_len, kv="paged")


def small_facts(
    *, batches: tuple[int, ...] = (1, 4, 8), context: int = 96, block: int = 8, rows: int = 32, vocab: int = 97, eos: tuple[int, ...] = ()
) -> CalbinFacts:
    decode = tuple(submodel(Role.DECODE, b, 1, context) for b in batches)
    extend = tuple(submodel(Role.EXTEND, b, 8, context, min(8 * b, rows)) for b in batches)
    prefill = (submodel(Role.PREFILL, 4, rows, context, rows),)
    return CalbinFacts(
        name="small",
        submodels=(*decode, *extend, *prefill),
        max_tokens_per_launch=rows,
        late_inputs=False,
        block_positions=block,
        bytes_per_block=1024,
        vocab=vocab,
        model_context=context,
        eos_ids=eos,
    )
