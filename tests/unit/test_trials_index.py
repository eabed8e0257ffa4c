"""The index of trials names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
TRIALS = range(1, 68, 2)


def rows() -> dict[int, list[str]]:
    lines = re.findall(r"^\| (\d+) \|[^|]+\|([^|]+)\|$", (TESTS / "TRIALS.md").read_text(encoding="utf-8"), re.MULTILINE)
    return {int(number): re.findall(r"`([^`]+)`", names) for number, names in lines}


def test_every_trial_has_a_test() -> None:
    found = rows()
    assert sorted(found) == list(TRIALS)
    assert all(found.values())


def test_every_test_of_the_index_exists() -> None:
    names = [name for names in rows().values() for name in names]
    defined = {}
    for path in {name.split("::")[0] for name in names}:
        tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
        defined[path] = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    missing = [name for name in names if name.split("::")[1] not in defined[name.split("::")[0]]]
    assert not missing
