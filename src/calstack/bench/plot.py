"""A report as a picture: one panel per phase, bars with their spread, peers beside us."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calstack.bench.report import Report, Row
from calstack.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["check_plot", "plot"]

_PHASES = (("prefill", "prompt"), ("decode", "depth"), ("batch", "batch"))


def check_plot(path: Path) -> None:
    """See before a long run that its picture can be written.

    Raises:
        UsageError: matplotlib is missing, or the name ends in something that it does not write.
    """
    formats = _figure_class()(figsize=(1, 1)).canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in formats:
        raise UsageError(f"{path} cannot be written as a picture", where="--plot", remedy="end its name in .png, .svg or .pdf")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{path.parent} is no directory", where="--plot", remedy="make it first")


def plot(report: Report, path: Path) -> None:
    """Write the report's rows to `path`; the format follows from its ending."""
    shown = [(phase, field) for phase, field in _PHASES if any(row.phase == phase for row in report.rows)]
    figure = _figure_class()(figsize=(5.5 * len(shown), 4), layout="constrained")
    figure.suptitle(f"{report.model['calbin']}, {report.machine.cpu}, {report.machine.threads} threads, {report.machine.isa}", fontsize=9)
    for axes, (phase, field) in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        _panel(axes, phase, field, [row for row in report.rows if row.phase == phase])
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), fontsize=8)
    figure.savefig(path, dpi=150)


def _figure_class() -> type[Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("matplotlib is not installed", where="--plot", remedy="pip install 'calstack[report]'") from error
    return Figure


def _panel(axes: Axes, phase: str, field: str, rows: Sequence[Row]) -> None:
    at = sorted({getattr(row, field) for row in rows})
    series = _series(rows, field)
    width = 0.8 / len(series)
    for index, (name, values) in enumerate(series.items()):
        places = [at.index(where) + width * (index - (len(series) - 1) / 2) for where in values]
        medians = [median for median, _ in values.values()]
        below = [median - low for median, (low, _) in values.values()]
        above = [high - median for median, (_, high) in values.values()]
        axes.bar(places, medians, width, label=name, yerr=(below, above), capsize=2)
    axes.set_xticks(range(len(at)), [str(value) for value in at])
    axes.set_xlabel({"prompt": "prompt tokens", "depth": "tokens in the cache", "batch": "sequences"}[field])
    axes.set_ylabel("tokens/s")
    axes.set_title(phase)


def _series(rows: Iterable[Row], field: str) -> dict[str, dict[int, tuple[float, tuple[float, float]]]]:
    """Name -> place on the axis -> (median, spread); ours by way, then the peers."""
    ours: dict[str, dict[int, tuple[float, tuple[float, float]]]] = {}
    peers: dict[str, dict[int, tuple[float, tuple[float, float]]]] = {}
    for row in rows:
        ours.setdefault(f"calstack, {row.through}", {})[getattr(row, field)] = (row.tok_s, row.spread)
        if row.peer and row.peer_tok_s and row.peer_spread:
            peers.setdefault(row.peer, {})[getattr(row, field)] = (row.peer_tok_s, row.peer_spread)
    return {**ours, **peers}
