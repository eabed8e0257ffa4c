"""Serving costs little processor time per streamed token, whatever else the machine does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "serving_cost.py"


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.native
def test_a_streamed_token_costs_less_than_a_tenth_of_a_millisecond(smollm2_calbin: Path) -> None:
    run = subprocess.run([sys.executable, str(TOOL), str(smollm2_calbin)], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    found = re.search(r"^serving +([\d.]+) ms", run.stdout, re.MULTILINE)
    assert found is not None, run.stdout
    assert float(found[1]) < 0.1, run.stdout
