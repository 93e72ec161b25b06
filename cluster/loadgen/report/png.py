"""Charts as PNG files, by matplotlib, which is an extra: ``pip install 'kvferry[plots]'``."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from kvferry.cluster.loadgen.report.chart import COLOURS, Chart, Line
from kvferry.kv_cache.errors import KVFerryError


class PlotsMissing(KVFerryError):
    """matplotlib is not installed; says how it would be."""

    exit_code = 2

    def __init__(self) -> None:
        super().__init__(
            "PNG files need matplotlib, which is not installed: pip install 'kvferry[plots]'. "
            "The HTML report does not need it"
        )


def require_plots() -> Any:
    """The class of matplotlib's figures; it draws into memory, without a screen.

    Raises PlotsMissing.
    """
    try:
        return import_module("matplotlib.figure").Figure
    except ModuleNotFoundError as error:
        raise PlotsMissing from error


def write_pngs(charts: Sequence[Chart], folder: Path) -> list[Path]:
    """One file for each chart, by its name. Raises PlotsMissing."""
    figure_class = require_plots()
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for chart in charts:
        figure = figure_class(figsize=(6.4, 4.0), layout="constrained")
        axes = figure.subplots()
        left, right, top = chart.spans()
        for line in chart.lines:
            _draw(line, axes)
        axes.set_xlim(left, right)
        axes.set_ylim(0, top * 1.03)
        axes.set_title(chart.title, fontsize=10, parse_math=False)
        axes.set_xlabel(chart.x_label)
        axes.set_ylabel(chart.y_label)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
        path = folder / f"{chart.name}.png"
        figure.savefig(path, dpi=130)
        written.append(path)
    return written


def _draw(line: Line, axes: Any) -> None:
    colour = COLOURS[line.colour % len(COLOURS)]
    xs, ys = [x for x, _ in line.points], [y for _, y in line.points]
    axes.plot(
        xs,
        ys,
        color=colour,
        linestyle="--" if line.is_dashed else "-",
        marker="o" if line.has_marks else None,
        markersize=4,
        label=line.name,
    )
    for (x, y), ends in zip(line.points, line.intervals, strict=False):
        if ends is not None:
            spread = [[y - ends[0]], [ends[1] - y]]
            axes.errorbar([x], [y], yerr=spread, color=colour, capsize=3, linewidth=1)
