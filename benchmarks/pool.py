"""Cost of a phase of the thread pool: hand-over, barrier and chunks, without work."""

from __future__ import annotations

from calstack.native import _core


def main() -> None:
    """Print nanoseconds per phase."""
    for threads in (1, 2):
        for units in (2, 16, 64):
            _, busy = _core.pool_probe(threads, 20_000, units, 2, 1 << 20, 0, 0)
            _, together = _core.pool_probe_together(threads, 400, 50, units, 2, 1 << 20)
            _, slept = _core.pool_probe(threads, 200, units, 2, 1 << 20, 1, 200)
            print(
                f"{threads} threads, {units:3d} units: {busy:8.0f} ns while running, {slept:8.0f} ns after 200 us of silence, "
                f"{together:8.0f} ns among phases of one launch"
            )


if __name__ == "__main__":
    main()
