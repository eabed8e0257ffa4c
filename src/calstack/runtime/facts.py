"""What a scheduler must know of a calbin, as plain data taken from its manifest, and the choice of a submodel by that data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from calstack.calbin.manifest import Manifest
from calstack.calbin.manifest import Submodel as ManifestSubmodel
from calstack.errors import ArtifactError
from calstack.specs import Role

__all__ = ["CalbinFacts", "Extent", "SubmodelFacts"]


@dataclasses.dataclass(frozen=True, slots=True)
class Extent:
    """One lane of a wanted launch: positions before it and tokens it adds."""

    past: int
    cur: int

    @property
    def end(self) -> int:
        """Positions of the lane after the launch."""
        return self.past + self.cur


@dataclasses.dataclass(frozen=True, slots=True)
class SubmodelFacts:
    """One submodel: its identity and its bounds."""

    key: str
    role: Role
    batch: int  # most lanes
    q_len: int  # most tokens of a lane
    context: int  # most positions of a lane
    rows: int  # most tokens over all lanes
    kv: str

    def fits(self, lanes: Sequence[Extent]) -> bool:
        """True when a launch of these lanes keeps every bound of the submodel."""
        return (
            0 < len(lanes) <= self.batch
            and sum(lane.cur for lane in lanes) <= self.rows
            and all(0 < lane.cur <= self.q_len and lane.past >= 0 and lane.end <= self.context for lane in lanes)
        )


@dataclasses.dataclass(frozen=True, slots=True)
class CalbinFacts:
    """The manifest's facts that the engine plans with. `submodels` holds only those whose KV kind the calbin's cache has."""

    name: str
    submodels: tuple[SubmodelFacts, ...]
    max_tokens_per_launch: int
    late_inputs: bool
    block_positions: int
    bytes_per_block: int
    vocab: int
    model_context: int
    eos_ids: tuple[int, ...] = ()
    encoder: bool = False
    types: int = 1  # segments of an encoder

    @staticmethod
    def from_manifest(manifest: Manifest) -> CalbinFacts:
        """Raises ArtifactError naming what a calbin lacks to be served."""
        encoder = manifest.model.encoder
        kv = manifest.kv.kind if encoder is None else "none"
        facts = CalbinFacts(
            name=manifest.model.name,
            submodels=tuple(_submodel(s) for s in manifest.submodels if s.kv == kv),
            max_tokens_per_launch=manifest.constraints.max_tokens_per_launch,
            late_inputs=manifest.constraints.late_inputs,
            block_positions=manifest.kv.block_positions,
            bytes_per_block=manifest.kv.bytes_per_block,
            vocab=manifest.model.vocab,
            model_context=manifest.model.context,
            eos_ids=manifest.model.eos_ids,
            encoder=encoder is not None,
            types=encoder.types if encoder else 1,
        )
        facts.check(kv)
        return facts

    def check(self, kv: str = "paged") -> None:
        """Raise ArtifactError when the engine cannot serve this calbin."""
        if not self.encoder and kv != "paged":
            raise ArtifactError(f"the KV cache kind {kv!r} is not served", where="manifest.kv.kind", remedy="compile with paged KV")
        for role in (Role.ENCODE,) if self.encoder else (Role.PREFILL, Role.DECODE):
            if not self.of_role(role):
                raise ArtifactError(f"no {role} submodel", where="manifest.submodels", remedy="compile the model again")
        if self.max_tokens_per_launch < 1 or self.block_positions < 1:
            raise ArtifactError("a bound is not positive", where="manifest.constraints", remedy="compile the calbin again")

    def of_role(self, role: Role) -> tuple[SubmodelFacts, ...]:
        """The submodels of a role, smallest first."""
        return tuple(sorted((s for s in self.submodels if s.role is role), key=_size))

    @property
    def context(self) -> int:
        """Most positions of a request: what both phases can hold, or a text."""
        if self.encoder:
            return min(self.of_role(Role.ENCODE)[-1].context, self.model_context)
        phases = [max(s.context for s in self.of_role(role)) for role in (Role.PREFILL, Role.DECODE)]
        return min([*phases, self.model_context])

    @property
    def max_lanes(self) -> int:
        """Lanes of the largest decode batch, or texts of a launch."""
        return max(s.batch for s in self.of_role(Role.ENCODE if self.encoder else Role.DECODE))

    def blocks_for(self, positions: int) -> int:
        """KV blocks that cover `positions`."""
        return -(-positions // self.block_positions)


def _size(sub: SubmodelFacts) -> tuple[int, int, int, int]:
    return (sub.rows, sub.batch, sub.context, sub.q_len)


def _submodel(sub: ManifestSubmodel) -> SubmodelFacts:
    return SubmodelFacts(key=sub.key, role=sub.role, batch=sub.batch, q_len=sub.q_len, context=sub.context, rows=sub.rows, kv=sub.kv)
