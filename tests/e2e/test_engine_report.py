"""The engine report's sections with fewer requests: what serving keeps under crashes, faults and cancellations."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = [pytest.mark.native, pytest.mark.model, pytest.mark.full]


@pytest.fixture(scope="module")
def report() -> ModuleType:
    spec = importlib.util.spec_from_file_location("engine_report", Path(__file__).parents[2] / "tools" / "engine_report.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["engine_report"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("section", ["exactness", "nothing-lost", "recovery"])
def test_section_keeps_what_it_asks(report: ModuleType, smollm2_calbin: Path, section: str) -> None:
    figures = asyncio.run(report.SECTIONS[section](smollm2_calbin, 0.1))
    missed = [f"{one.what}: {one.measured}, asked {one.asked}" for one in figures if not one.met]
    assert figures
    assert not missed
