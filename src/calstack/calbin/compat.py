"""Whether a calbin fits a device: every field compared, both sides named, nothing guessed."""

from __future__ import annotations

import msgspec

from calstack.calbin.manifest import Manifest, Submodel
from calstack.errors import ArtifactError
from calstack.specs import Role

__all__ = ["Mismatch", "Offer", "Wish", "check_fit", "mismatches", "nearest"]


_OPTION = {"batch": "batch", "q_len": "context", "context": "context"}


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """What a device offers, in the manifest's terms; an empty string means the device does not say."""

    name: str
    chips: int
    packed_layouts: tuple[str, ...]
    numerics: tuple[int, ...]
    dram_bytes: tuple[int, ...]  # per chip; 0 = not known
    driver: str = ""
    firmware: str = ""


class Mismatch(msgspec.Struct, frozen=True):
    """One field that does not fit."""

    field: str
    calbin: str
    device: str
    remedy: str


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """A launch that somebody wants: lanes, tokens of a lane, positions."""

    role: Role
    batch: int
    tokens: int
    context: int


def nearest(manifest: Manifest, wish: Wish) -> tuple[Submodel | None, tuple[Mismatch, ...]]:
    """The submodel that misses the fewest wishes by the least, and what it misses; None when the role is missing."""
    same = [s for s in manifest.submodels if s.role is wish.role]
    if not same:
        roles = ", ".join(sorted({s.role for s in manifest.submodels}))
        return None, (Mismatch("$.submodels[].role", roles, wish.role, "compile a model that has this role"),)
    pairs = [(s, _missed(s, wish)) for s in same]
    best, missed = min(pairs, key=lambda pair: (len(pair[1]), sum(want - have for _, have, want in pair[1]), pair[0].batch))
    remedies = ((field, have, want, _OPTION[field.rpartition(".")[2]]) for field, have, want in missed)
    return best, tuple(Mismatch(field, str(have), str(want), f"compile with more: --{option}") for field, have, want, option in remedies)


def _missed(submodel: Submodel, wish: Wish) -> list[tuple[str, int, int]]:
    limits = (("batch", submodel.batch, wish.batch), ("q_len", submodel.q_len, wish.tokens), ("context", submodel.context, wish.context))
    return [(f"$.submodels[{submodel.key}].{field}", have, want) for field, have, want in limits if want > have]


def mismatches(manifest: Manifest, offer: Offer) -> tuple[Mismatch, ...]:
    """Every field of the manifest that the device does not meet."""
    found: list[Mismatch] = []

    def compare(field: str, *, good: bool, calbin: object, device: object, remedy: str) -> None:
        if not good:
            found.append(Mismatch(field, str(calbin), str(device), remedy))

    layout, numerics, chips = manifest.packed_layout, manifest.numerics, manifest.target.chips
    compare(
        "$.packed_layout", good=layout in offer.packed_layouts, calbin=layout, device=offer.packed_layouts, remedy="compile for this target"
    )
    compare("$.numerics", good=numerics in offer.numerics, calbin=numerics, device=offer.numerics, remedy="compile with this version")
    compare("$.target.chips", good=len(chips) <= offer.chips, calbin=len(chips), device=offer.chips, remedy="compile for fewer chips")
    for chip, room in zip(chips, offer.dram_bytes, strict=False):
        good = room == 0 or chip.dram_bytes <= room
        compare(f"$.target.chips[{chip.id}].dram_bytes", good=good, calbin=chip.dram_bytes, device=room, remedy="a smaller --context")
    needs = manifest.compatibility
    for field in ("device", "driver", "firmware"):
        want, have = getattr(needs, field), getattr(offer, "name" if field == "device" else field)
        good = want in {"any", have}
        compare(
            f"$.compatibility.{field}", good=good, calbin=want, device=have or "does not say", remedy=f"another {field}, or compile again"
        )
    return tuple(found)


def check_fit(manifest: Manifest, offer: Offer) -> None:
    """Raise ArtifactError naming the first field that does not fit, and how many others."""
    found = mismatches(manifest, offer)
    if found:
        first, more = found[0], f" and {len(found) - 1} other fields differ" if len(found) > 1 else ""
        raise ArtifactError(
            f"the calbin needs {first.calbin}, device {offer.name} has {first.device}{more}",
            where=f"manifest.json {first.field}",
            remedy=first.remedy,
        )
