"""Compiled calbins in the cache: one directory per model name and compilation."""

from __future__ import annotations

import hashlib
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from calstack.calbin.manifest import FORMAT_MAJOR, FORMAT_MINOR, NUMERICS, PACKED_LAYOUT
from calstack.calbin.reader import open_calbin
from calstack.errors import ArtifactError

if TYPE_CHECKING:
    from calstack.api import CompileOptions

__all__ = ["calbin_path", "is_whole"]

COMPILE_ROOMS = ("specs.py", "calbin", "frontends", "graph", "compiler", "quality", "targets")


def calbin_path(cache: Path, name: str, options: CompileOptions) -> Path:
    """Where the calbin of `name` compiled with `options` by this version lies.

    The compiler's own sources are part of the name, so that an upgrade or an edit never serves an older calbin.
    """
    digest = hashlib.sha256(repr((FORMAT_MAJOR, FORMAT_MINOR, NUMERICS, PACKED_LAYOUT, options)).encode())
    package = Path(str(resources.files("calstack")))
    for room in COMPILE_ROOMS:
        for path in sorted((package / room).rglob("*.py")) or [package / room]:
            digest.update(path.read_bytes())
    stem = name.replace("/", "--")
    return cache / "calbins" / f"{stem}-{digest.hexdigest()[:12]}" / f"{stem}.calbin"


def is_whole(calbin: Path) -> bool:
    """True when the calbin is there and opens."""
    try:
        open_calbin(calbin)
    except ArtifactError:
        return False
    return True
