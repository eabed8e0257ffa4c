"""A token bucket: so much a second on average, and a burst at once."""

from __future__ import annotations

__all__ = ["Bucket"]


class Bucket:
    """Full at first. All times in seconds of one monotonic clock.

    Args:
        rate: what flows in a second, above 0.
        burst: the most it holds.
    """

    __slots__ = ("_at", "_level", "burst", "rate")

    def __init__(self, rate: float, burst: float) -> None:
        self.rate, self.burst = rate, burst
        self._level, self._at = burst, 0.0

    def wait_s(self, amount: float, now: float) -> float:
        """How long until `amount` may be taken; 0 when it may be now. More than the burst counts as the burst."""
        self._flow(now)
        return max(0.0, (min(amount, self.burst) - self._level) / self.rate)

    def take(self, amount: float, now: float) -> None:
        """Take it, below zero if need be; a negative amount gives back."""
        self._flow(now)
        self._level = min(self.burst, self._level - amount)

    def _flow(self, now: float) -> None:
        self._level = min(self.burst, self._level + max(0.0, now - self._at) * self.rate)
        self._at = max(self._at, now)
