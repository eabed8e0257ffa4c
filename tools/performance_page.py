"""Write docs/reference/performance.md from the reports that `calstack bench --json` left in docs/reference/bench/.

Usage: python tools/performance_page.py
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from calstack.bench.report import Report, Row

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "docs" / "reference" / "bench"
PAGE = ROOT / "docs" / "reference" / "performance.md"

HEAD = """# Performance

Every figure was printed by the command above its table; peers took turns with us in the same run on the same machine, each with its
own default settings and its own timing. tok/s are medians, the range is lowest to highest. Quality is that of the calbin measured.
This page is written by `python tools/performance_page.py` from the reports in `docs/reference/bench/`.
"""


def page() -> str:
    """The page's text."""
    parts = [HEAD]
    for path in sorted(REPORTS.glob("*.json")):
        command = path.with_suffix(".txt").read_text().strip()
        parts.append(_section(path.stem, command, msgspec.json.decode(path.read_bytes(), type=Report)))
    return "\n".join(parts)


def _section(name: str, command: str, report: Report) -> str:
    machine = report.machine
    lines = [
        f"## {name}",
        "",
        f"```sh\n{command}\n```",
        "",
        f"{machine.cpu}, {machine.threads} threads, {machine.isa}, {machine.memory_gib} GiB; {report.repeats} rounds; "
        + ", ".join(f"{package} {version}" for package, version in report.versions.items()),
        "",
        "Quality: " + ", ".join(f"{k} {v:.5g}" if isinstance(v, float) else f"{k} {v}" for k, v in report.quality.items()) + ".",
        "",
        "| phase | through | prompt | depth | batch | tok/s | peer | peer tok/s | ratio |",
        "|---|---|---|---|---|---|---|---|---|",
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
    )
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _rate(median: float, spread: tuple[float, float]) -> str:
    return f"{median:.0f} ({spread[0]:.0f}-{spread[1]:.0f})"


if __name__ == "__main__":
    PAGE.write_text(page())
