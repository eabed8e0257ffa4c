"""Prints the size of functions and files under src/ and fails above the budget: p90 <= 25 lines, at most 1 % over 60, files <= 400."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

P90, LONG, LONG_SHARE, FILE = 25, 60, 0.01, 400


def functions(path: Path) -> list[tuple[int, str]]:
    """(lines, where) of every function in a file."""
    tree = ast.parse(path.read_text("utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [((n.end_lineno or n.lineno) - n.lineno + 1, f"{path}:{n.lineno} {n.name}") for n in ast.walk(tree) if isinstance(n, kinds)]


def main() -> int:
    paths = sorted(Path("src").rglob("*.py"))
    sizes = sorted(size for path in paths for size, _ in functions(path))
    files = sorted(((len(path.read_text("utf-8").splitlines()), str(path)) for path in paths), reverse=True)
    long = sorted((item for path in paths for item in functions(path) if item[0] > LONG), reverse=True)
    big = [item for item in files if item[0] > FILE]
    median, p90 = sizes[len(sizes) // 2], sizes[int(len(sizes) * 0.9)]
    print(f"{len(files)} files, median {files[len(files) // 2][0]}, longest {files[0][0]} lines; ", end="")
    print(
        f"{len(sizes)} functions, median {median}, p90 {p90}, longest {sizes[-1]}; over {LONG}: {len(long)} ({len(long) / len(sizes):.1%})"
    )
    for size, where in long + big:
        print(f"  {size:5d}  {where}")
    good = p90 <= P90 and len(long) <= LONG_SHARE * len(sizes) and not big
    if not good:
        print(f"over budget: p90 <= {P90}, over {LONG} lines <= {LONG_SHARE:.0%}, files <= {FILE} lines", file=sys.stderr)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
