from __future__ import annotations

import ast
from pathlib import Path

import pytest

import calstack.native

pytestmark = pytest.mark.native


def public(names) -> set[str]:
    return {n for n in names if not n.startswith("_") and not n.startswith("@")}


def test_the_stub_names_what_the_module_has():
    module = calstack.native._core
    tree = ast.parse(Path(calstack.native.__file__).with_name("_core.pyi").read_text())
    classes = {n.name: public(d.name for d in n.body if isinstance(d, ast.FunctionDef)) for n in tree.body if isinstance(n, ast.ClassDef)}
    functions = public(n.name for n in tree.body if isinstance(n, ast.FunctionDef))
    values = public(n.target.id for n in tree.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name))
    assert functions | values | set(classes) == public(vars(module))
    for name in ("CpuDevice", "CalbinBuilder"):
        assert classes[name] == public(vars(getattr(module, name))), name
