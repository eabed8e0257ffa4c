"""Fixtures every test may use. A test that takes one of these gets the marker that belongs to it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from calstack.cli.app import default_cache
from calstack.frontends import hub
from calstack.progress import Silent

MARKERS_OF_FIXTURES = {"smollm2_gguf": "model", "smollm2_calbin": "model"}
DEMO = "smollm2-135m"
PULL_TIMEOUT_S = 900


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add to each test the markers of the fixtures it takes."""
    for item in items:
        for fixture in getattr(item, "fixturenames", ()):
            if marker := MARKERS_OF_FIXTURES.get(fixture):
                item.add_marker(marker)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The demo model's GGUF file, fetched into the user's cache on first use."""
    return hub.resolve(DEMO, default_cache(), Silent())


@pytest.fixture(scope="session")
def smollm2_calbin() -> Path:
    """The demo model's calbin with default options, compiled into the user's cache on first use."""
    command = [sys.executable, "-m", "calstack", "pull", DEMO]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PULL_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.splitlines()[-1])
