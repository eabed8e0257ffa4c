"""Write docs/reference/performance.md from the reports that `calstack bench --json` left in docs/reference/bench/.

Usage: python tools/performance_page.py
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from calstack.bench.report import Report, Row

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "docs" / "reference" / "bench"
BARS = REPORTS / "bars.toml"
PAGE = ROOT / "docs" / "reference" / "performance.md"

HEAD = """# Performance

Every figure was printed by the command above its table; peers took turns with us in the same run on the same machine, each with its
own default settings and its own timing. tok/s are medians, the range is lowest to highest. Quality is that of the calbin measured.
This page is written by `python tools/performance_page.py` from the reports in `docs/reference/bench/`.
"""


BARS_HEAD = """## Asked and measured

What this project holds itself to, against what the reports below say. A ratio is our rate over the peer's in the same run.

| report | point | against | asked | measured | |
|---|---|---|---|---|---|"""


class Bar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One figure asked for: a ratio to a peer, a share of the machine's limit, or a slowdown against another point of the report."""

    report: str
    phase: str
    at: int  # prompt length of prefill, depth of decode, sequences of batch
    least: float | None = None
    most: float | None = None
    through: str = "device"
    peer: str | None = None  # None: the limit, or `than`
    than: int | None = None  # the other point, for `most` times its time per token


def page() -> str:
    """The page's text."""
    reports = {path.stem: msgspec.json.decode(path.read_bytes(), type=Report) for path in sorted(REPORTS.glob("*.json"))}
    bars = msgspec.toml.decode(BARS.read_bytes(), type=dict[str, list[Bar]])["bar"]
    parts = [HEAD, BARS_HEAD, *(_bar(bar, reports[bar.report].rows) for bar in bars if bar.report in reports), ""]
    for name, report in reports.items():
        command = (REPORTS / f"{name}.txt").read_text().strip()
        parts.append(_section(name, command, report))
    return "\n".join(parts)


def _bar(bar: Bar, rows: Sequence[Row]) -> str:
    row = _find(bar, rows, bar.at)
    if bar.than is not None:
        value, against = _find(bar, rows, bar.than).tok_s / row.tok_s, f"time per token at {bar.than}"
    elif bar.peer is None:
        value, against = row.share_of_limit or 0.0, "the machine's limit"
    else:
        value, against = row.ratio or 0.0, bar.peer
    met = (bar.least is None or value >= bar.least) and (bar.most is None or value <= bar.most)
    asked = f"≥ {bar.least:g}" if bar.least is not None else f"≤ {bar.most:g}"
    cells = (bar.report, f"{bar.phase} {bar.at}, {bar.through}", against, asked, f"{value:.2f}", "met" if met else "**not met**")
    return "| " + " | ".join(cells) + " |"


def _find(bar: Bar, rows: Sequence[Row], at: int) -> Row:
    field = {"prefill": "prompt", "decode": "depth", "batch": "batch"}[bar.phase]
    fits = [row for row in rows if (row.phase, row.through, getattr(row, field)) == (bar.phase, bar.through, at)]
    return next(row for row in fits if bar.peer is None or row.peer == bar.peer)


def _section(name: str, command: str, report: Report) -> str:
    machine = report.machine
    lines = [
        f"## {name}",
        "",
        f"```sh\n{command}\n```",
        "",
        f"{machine.cpu}, {machine.threads} threads, {machine.isa}, {machine.memory_gib} GiB; {report.repeats} rounds; "
        + ", ".join(f"{package} {version}" for package, version in report.versions.items())
        + (f"; read {machine.read_gb_s:.1f} GB/s, int8 {machine.int8_gop_s:.0f} GOP/s" if machine.read_gb_s else ""),
        "",
        "Quality: " + ", ".join(f"{k} {v:.5g}" if isinstance(v, float) else f"{k} {v}" for k, v in report.quality.items()) + ".",
        "",
        "| phase | through | prompt | depth | batch | tok/s | peer | peer tok/s | ratio | of limit |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(_line(row) for row in report.rows),
        "",
    ]
    return "\n".join(lines)


def _line(row: Row) -> str:
    peer = _rate(row.peer_tok_s, row.peer_spread) if row.peer_tok_s and row.peer_spread else ""
    ratio = f"{row.ratio:.2f}x" if row.ratio else ""
    cells = (
        row.phase,
        row.through,
        row.prompt or "",
        row.depth or "",
        row.batch,
        _rate(row.tok_s, row.spread),
        row.peer or "",
        peer,
        ratio,
        f"{row.share_of_limit:.0%}" if row.share_of_limit else "",
    )
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _rate(median: float, spread: tuple[float, float]) -> str:
    return f"{median:.0f} ({spread[0]:.0f}-{spread[1]:.0f})"


if __name__ == "__main__":
    PAGE.write_text(page())
