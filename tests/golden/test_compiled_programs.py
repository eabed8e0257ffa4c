"""Programs and packed parameters of the tiny models, as committed: a change here is a change of what users compile.

Written by `python -m tests.golden.test_compiled_programs` from the repository's root.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from calstack.calbin.writer import encode_program
from calstack.compiler.options import CompileOptions
from calstack.compiler.pipeline import plan_bundle
from calstack.compiler.quantize.fill import fill
from calstack.specs import QuantSpec, WeightFormat
from tests.support.tiny import TINY, bundle, plan

FOLDER = Path(__file__).parent / "compiler"
OPTIONS: dict[str, Any] = {"batches": (1, 4), "context": 256, "prefill_rows": 64}


def programs(name: str) -> dict[str, str]:
    """File name and text of every program of a tiny model."""
    return {f"{name}.{draft.submodel.key}.json": encode_program(draft.program).decode() for draft in plan(name, **OPTIONS).drafts}


def parameters(name: str) -> dict[str, str]:
    """sha256 of every packed tensor with f32 weights: no search, so the same on every machine."""
    made = plan_bundle(bundle(name), CompileOptions(quant=QuantSpec(default=WeightFormat.F32), **OPTIONS))
    found = {}
    for planned in made.table.plans:
        tensor = getattr(planned, "weight", None) or getattr(planned, "vector", None)
        assert tensor is not None
        found[tensor.tensor] = hashlib.sha256(next(fill(planned, made.table)).tobytes()).hexdigest()
    return found


@pytest.mark.parametrize("name", TINY)
def test_programs_are_the_committed_ones(name: str) -> None:
    made = programs(name)
    committed = {path.name: path.read_text() for path in FOLDER.glob(f"{name}.*.paged.json")}
    assert made.keys() == committed.keys()
    for file, text in made.items():
        assert text == committed[file], file


@pytest.mark.parametrize("name", TINY)
def test_packed_parameters_are_the_committed_ones(name: str) -> None:
    assert parameters(name) == json.loads((FOLDER / f"{name}.parameters.json").read_text())


def main() -> None:
    for name in TINY:
        for file, text in programs(name).items():
            (FOLDER / file).write_text(text)
        (FOLDER / f"{name}.parameters.json").write_text(json.dumps(parameters(name), indent=1) + "\n")


if __name__ == "__main__":
    main()
