"""The compatibility matrix as data, and whether versions meet it."""

from __future__ import annotations

import functools
import importlib.resources
import re

import msgspec

import calstack
from calstack.calbin.manifest import Manifest
from calstack.errors import ArtifactError

__all__ = ["MatrixRow", "check_versions", "matrix", "meets"]

_VERSION = re.compile(r"(>=)?(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?")


class MatrixRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One format, and the versions that go with it: `any`, `X.Y.Z` or `>=X.Y.Z`."""

    format: str
    compiler: str
    runtime: str
    device: str
    driver: str
    firmware: str


@functools.cache
def matrix() -> tuple[MatrixRow, ...]:
    """The rows of matrix.toml."""
    text = importlib.resources.files("calstack.calbin").joinpath("matrix.toml").read_bytes()
    return tuple(msgspec.toml.decode(text, type=dict[str, list[MatrixRow]])["row"])


def meets(version: str, wanted: str) -> bool:
    """Whether a version is what `wanted` says; a version or a wish that cannot be read meets nothing."""
    if wanted == "any":
        return True
    want, have = _VERSION.fullmatch(wanted), _VERSION.match(version)
    if want is None or have is None:
        return version == wanted
    need, is_ = (tuple(int(part or 0) for part in m.groups()[1:]) for m in (want, have))
    return is_ >= need if want[1] else is_ == need


def check_versions(manifest: Manifest, name: str) -> None:
    """The artifact's versions and this version's meet each other.

    Raises:
        ArtifactError: naming both versions.
    """
    own, needs = calstack.__version__, manifest.compatibility
    if not meets(own, needs.runtime):
        raise ArtifactError(
            f"needs a runtime {needs.runtime}, this is {own}", where=f"{name} $.compatibility.runtime", remedy="use a newer calstack"
        )
    rows = [row for row in matrix() if row.format == needs.format]
    if not any(meets(needs.compiler, row.compiler) and meets(own, row.runtime) for row in rows):
        known = ", ".join(f"format {row.format} by compilers {row.compiler}" for row in matrix())
        raise ArtifactError(
            f"has format {needs.format} by compiler {needs.compiler}, calstack {own} reads {known}",
            where=f"{name} $.compatibility",
            remedy="compile the model again",
        )
