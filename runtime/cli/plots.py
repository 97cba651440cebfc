"""Bar charts of benchmarks' results, as a PNG or as a page of its own. They need matplotlib, the extra `bench`."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from phloem.runtime.errors import InvalidRequest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".html")
_INCHES_PER_BAR, _MIN_INCHES, _MAX_INCHES = 0.35, 6.0, 24.0


@dataclass(frozen=True, slots=True)
class Bars:
    """One chart: groups side by side, and in each a bar of every series."""

    title: str
    unit: str
    groups: Sequence[str]
    series: Mapping[str, Sequence[float | None]]
    """By name, a value per group; None leaves a gap."""

    is_log: bool = False
    """Whether the axis is logarithmic."""


def check_plot_path(path: Path | None) -> None:
    """Check, before minutes of measuring, that a plot can be written there.

    Raises:
        InvalidRequest: The name does not end in .png or .html, or matplotlib is not installed.
    """
    if path is None:
        return
    if path.suffix not in SUFFIXES:
        raise InvalidRequest(f"--plot takes a name that ends in .png or .html, not {path.name}", field="plot")
    if find_spec("matplotlib") is None:
        raise InvalidRequest("--plot needs matplotlib: pip install 'phloem[bench]'", field="plot")


def write_plot(path: Path | None, title: str, charts: Sequence[Bars]) -> None:
    """Draw charts one below the other, when a file was asked for: a PNG, or a page without scripts that needs no other file."""
    if path is None:
        return
    figure = _figure(charts)
    if path.suffix == ".png":
        figure.savefig(path, dpi=150)
        return
    drawing = io.StringIO()
    figure.savefig(drawing, format="svg")
    svg = drawing.getvalue()
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f"<h1>{escape(title)}</h1>\n{svg[svg.index('<svg') :]}\n</html>\n"
    )
    path.write_text(page, encoding="utf-8")


def _figure(charts: Sequence[Bars]) -> Figure:
    # The object-oriented interface: no window system, and no state of pyplot's.
    from matplotlib.figure import Figure

    most = max(len(chart.groups) * len(chart.series) for chart in charts)
    width = min(_MAX_INCHES, max(_MIN_INCHES, most * _INCHES_PER_BAR))
    figure = Figure(figsize=(width, 3.6 * len(charts)), layout="constrained")
    for chart, axes in zip(charts, figure.subplots(len(charts), squeeze=False)[:, 0], strict=True):
        bar_width = 0.8 / len(chart.series)
        for number, (name, values) in enumerate(chart.series.items()):
            shift = (number - (len(chart.series) - 1) / 2) * bar_width
            places = [group + shift for group in range(len(chart.groups))]
            heights = [float("nan") if value is None else value for value in values]
            axes.bar(places, heights, bar_width, label=name)
        turned = {"rotation": 30, "ha": "right"} if len(chart.groups) > 4 else {}
        axes.set_xticks(range(len(chart.groups)), chart.groups, **turned)
        axes.set_title(chart.title)
        axes.set_ylabel(chart.unit)
        if chart.is_log:
            axes.set_yscale("log")
        if len(chart.series) > 1:
            axes.legend()
    return figure
