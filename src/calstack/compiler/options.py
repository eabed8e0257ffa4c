"""What a user may ask of a compile."""

from __future__ import annotations

import msgspec

from calstack.errors import UsageError
from calstack.specs import MOST_EXTEND, KVDType, ModelSpec, QuantSpec

__all__ = ["CompileOptions"]

CONTEXT_MOST = 8192  # unless asked for more


class CompileOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of one compile; the defaults suit serving on the cpu target."""

    target: str = "cpu"
    quant: QuantSpec = QuantSpec()
    batches: tuple[int, ...] = (1, 4, 8, 16)  # of the decode submodels
    context: int = 0  # most positions of a lane; 0 = the model's own, at most 8,192
    prefill_rows: int = 512  # most tokens of a prefill launch
    extend: int = MOST_EXTEND  # most tokens of a lane of the extend submodels, which verify drafts; 0 = none of them
    kv_dtype: KVDType = KVDType.BF16

    def check(self, spec: ModelSpec) -> int:
        """The context that applies.

        Raises:
            UsageError: naming the option out of range.
        """
        context = self.context or min(spec.context, CONTEXT_MOST)
        if not self.batches or len(set(self.batches)) != len(self.batches) or not all(1 <= b <= 256 for b in self.batches):
            raise UsageError("takes different numbers from 1 to 256", where="--batch", remedy="for example --batch 1,4,8,16")
        least = min(64, spec.context)
        if not least <= context <= spec.context:
            raise UsageError(f"must lie in {least}..{spec.context}", where="--context", remedy=f"{self.context} was asked for")
        if not max(16, *self.batches) <= self.prefill_rows <= 8192:
            raise UsageError("must lie in 16..8192 and not below the largest batch", where="prefill_rows")
        if self.extend and not 2 <= self.extend <= MOST_EXTEND:
            raise UsageError(f"must be 0 or lie in 2..{MOST_EXTEND}", where="extend", remedy=f"{self.extend} was asked for")
        return context
