"""Fixtures every test may use. A test that takes one of these gets the marker that belongs to it."""

from __future__ import annotations

import pytest

MARKERS_OF_FIXTURES = {"smollm2_gguf": "model", "smollm2_calbin": "model"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add to each test the markers of the fixtures it takes."""
    for item in items:
        for fixture in getattr(item, "fixturenames", ()):
            if marker := MARKERS_OF_FIXTURES.get(fixture):
                item.add_marker(marker)
