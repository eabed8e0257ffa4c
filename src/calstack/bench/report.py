"""What a benchmark gives: rows with medians, spread and ratios, under a header that names machine, versions and quality."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

__all__ = ["Machine", "Report", "Row", "Samples"]


class Samples:
    """Seconds of repeated runs of the same work."""

    def __init__(self, seconds: Sequence[float], tokens: int) -> None:
        self.rates = sorted(tokens / s for s in seconds)

    @property
    def median(self) -> float:
        """Median tokens per second."""
        return statistics.median(self.rates)

    @property
    def spread(self) -> tuple[float, float]:
        """Lowest and highest tokens per second."""
        return self.rates[0], self.rates[-1]


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where it ran."""

    cpu: str
    cores: int
    threads: int
    memory_gib: float
    isa: str
    kernel: str
    read_gb_s: float = 0.0  # measured ceiling, 0 = not measured
    int8_gop_s: float = 0.0


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One measured point."""

    phase: str  # prefill | decode | batch
    through: str  # device | engine | http
    prompt: int
    depth: int
    batch: int
    tok_s: float
    spread: tuple[float, float]
    ttft_ms: float | None = None
    kv_dtype: str = ""
    peer: str | None = None
    peer_tok_s: float | None = None
    peer_spread: tuple[float, float] | None = None
    ratio: float | None = None
    share_of_limit: float | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The whole run: `calstack bench --json` prints this object."""

    machine: Machine
    versions: dict[str, str]
    model: dict[str, str]
    quality: dict[str, float | str]
    repeats: int
    rows: list[Row]
