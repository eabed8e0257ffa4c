"""Typed, range-checked access to a source's metadata (GGUF keys, config.json fields)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from calstack.frontends.reading import bad

__all__ = ["Metadata"]

T = TypeVar("T", int, float, str, bool)


class Metadata:
    """Values by key; a missing, mistyped or out-of-range value raises SourceError naming file and key."""

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path, self.values, self.prefix = path, values, prefix

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def _get(self, key: str, default: T | None) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            bad(self.path, self.prefix + key, "the key is missing")
        return value

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """An integer in [low, high]."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            bad(self.path, self.prefix + key, f"{_short(value)} is not an integer from {low} to {high}")
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """A finite number in [low, high]."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not low <= value <= high:
            bad(self.path, self.prefix + key, f"{_short(value)} is not a number from {low:g} to {high:g}")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            bad(self.path, self.prefix + key, f"{_short(value)} is not a text")
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        """True or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            bad(self.path, self.prefix + key, f"{_short(value)} is not true or false")
        return value

    def texts(self, key: str) -> list[str]:
        """A list of strings."""
        value = self.values.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            bad(self.path, self.prefix + key, "a list of texts is missing here")
        return value

    def integers(self, key: str) -> list[int]:
        """A list of integers."""
        value = self.values.get(key)
        if not isinstance(value, np.ndarray) or not np.issubdtype(value.dtype, np.integer):
            bad(self.path, self.prefix + key, "a list of integers is missing here")
        return [int(item) for item in value]

    def numbers(self, key: str) -> list[float]:
        """A list of finite numbers."""
        value = self.values.get(key)
        if not isinstance(value, np.ndarray) or not np.issubdtype(value.dtype, np.floating) or not np.isfinite(value).all():
            bad(self.path, self.prefix + key, "a list of finite numbers is missing here")
        return [float(item) for item in value]

    def section(self, key: str) -> Metadata:
        """A nested object; empty when the key is missing."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            bad(self.path, self.prefix + key, "not an object")
        return Metadata(self.path, value or {}, f"{self.prefix}{key}.")


def _short(value: object) -> str:
    return repr(value)[:60]
