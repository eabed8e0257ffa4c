"""Fails unless the newest entry of CHANGELOG.md is for the package's version."""

from __future__ import annotations

import re
import sys
from pathlib import Path


def main() -> int:
    newest = re.search(r"^## (\S+)", Path("CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    version = re.search(r'^__version__ = "(.+)"', Path("src/calstack/__init__.py").read_text("utf-8"), re.MULTILINE)
    if newest is None or version is None or newest[1] != version[1]:
        found = newest[1] if newest else "nothing"
        print(f"CHANGELOG.md starts with {found}, the package is {version[1] if version else 'without version'}", file=sys.stderr)
        return 1
    print(f"changelog: {version[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
