"""What `calstack plan` predicts for this machine beside what `calstack bench` measures, in turns in one run.

    python tools/plan_report.py model.gguf m.calbin [--rounds 5] [--out docs/reference/plan-accuracy.md]

The exit code is 1 when a median is more than 25 % off.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from calstack import api
from calstack.bench.runner import Point
from calstack.bench.session import Setup, run

MOST_OFF = 0.25
POINTS = {"prefill": Point("prefill", 512, 0, 1), "decode": Point("decode", 0, 64, 1)}


def _round(source: Path, calbin: Path) -> dict[str, tuple[float, float]]:
    """Predicted and measured tok/s of each point."""
    options = api.CompileOptions(target="cpu", batches=(1,))
    predicted = {speed.phase: speed.tok_s for speed in api.plan_model(source, options=options).speeds}
    setup = Setup(
        calbin=calbin, device="cpu", isa="", threads=0, lanes=1, positions=514, ways=("device",), peers=(), peer_model=None
    )  # fmt: skip
    rows = run(setup, list(POINTS.values()), repeats=5, note=lambda _: None).rows
    return {phase: (predicted[phase], row.tok_s) for phase, row in zip(POINTS, rows, strict=True)}


def main() -> int:
    """Print the table, and write it as a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("calbin", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rounds = [_round(options.source, options.calbin) for _ in range(options.rounds)]
    lines, good = ["| | predicted tok/s | measured tok/s | predicted / measured, median (range) | asked |", "|---|---|---|---|---|"], True
    for phase, point in POINTS.items():
        pairs = [found[phase] for found in rounds]
        ratios = sorted(predicted / measured for predicted, measured in pairs)
        middle = statistics.median(ratios)
        good &= abs(middle - 1) <= MOST_OFF
        name = f"{phase} {point.prompt or point.depth}"
        rates = [f"{statistics.median(values):.0f}" for values in zip(*pairs, strict=True)]
        lines.append(f"| {name} | {rates[0]} | {rates[1]} | {middle:.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f}) | 0.75 to 1.25 |")
    text = "\n".join(lines) + "\n"
    sys.stdout.write(text)
    if options.out is not None:
        head = "# How well plan predicts\n\nSmolLM2-135M on the cpu target, prediction and measurement in turns in one run:\n\n"
        command = "    python tools/plan_report.py SmolLM2-135M-Instruct.Q4_1.gguf smol.calbin --out docs/reference/plan-accuracy.md\n\n"
        options.out.write_text(head + command + text)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
