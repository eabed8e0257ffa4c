"""What docs/guides/new-architecture.md shows is what the code is."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from calstack.frontends.arch import qwen2
from calstack.frontends.arch.family import Family

GUIDE = (Path(__file__).parents[3] / "docs/guides/new-architecture.md").read_text()


def test_the_file_shown_whole_is_the_file() -> None:
    shown = re.search(r"qwen2\.py`, whole:\n\n```python\n(.*?)```", GUIDE, re.DOTALL)
    assert shown is not None
    assert shown[1] == Path(qwen2.__file__).read_text()


def test_every_field_of_a_family_that_the_guide_names_exists() -> None:
    named = set(re.findall(r"`Family\.(\w+)`", GUIDE)) - {"check"}
    fields = {field.name for field in dataclasses.fields(Family)}
    assert named <= fields
    told_elsewhere = {"model_type", "config", "gguf", "optional"}
    assert fields - named <= told_elsewhere, fields - named


def test_the_paths_that_the_guide_names_exist() -> None:
    root = Path(__file__).parents[3]
    for path in re.findall(r"`((?:src|tests|tools|docs)/[\w./-]+\.(?:py|md))`", GUIDE):
        assert (root / path).exists(), path
