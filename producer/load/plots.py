"""Draws a report's panels. Needs matplotlib, which comes with ``headrace[demo]``."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from producer.load.report import Panel, Series, text_of

_WIDTH, _HEIGHT, _BAR_HEIGHT, _DPI = 5.6, 4.2, 0.25, 110
_MARKED_POINTS = 40  # a series of more is drawn without markers
_DASHES = ("-", "--", ":", "-.")


def can_draw() -> bool:
    return find_spec("matplotlib") is not None


def draw(title: str, panels: Sequence[Panel], path: Path) -> None:
    """One PNG with the panels side by side."""
    from matplotlib.figure import Figure

    num_bars = max(len(series.x) if series.style == "bars" else 0 for panel in panels for series in panel.series)
    figure = Figure(figsize=(_WIDTH * max(2, len(panels)), max(_HEIGHT, _BAR_HEIGHT * num_bars)), layout="constrained")
    figure.suptitle(title, fontsize=11)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw_panel(axes, panel)
    figure.savefig(path, dpi=_DPI)


def _draw_panel(axes: Any, panel: Panel) -> None:
    for place, series in enumerate(panel.series):
        _draw_series(axes, series, f"C{place if series.color is None else series.color}")
    for label, value in panel.goals.items():
        axes.axhline(value, color="tab:red", linestyle="--", linewidth=1, label=label)
    for (label, value), style in zip(panel.marks.items(), ("--", ":", "-."), strict=False):
        axes.axvline(value, color="tab:red", linestyle=style, linewidth=1, label=label)
    axes.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    _scale(axes, panel)
    if sum(bool(series.label) for series in panel.series) + len(panel.goals) + len(panel.marks) > 1:
        axes.legend(fontsize=8)


def _scale(axes: Any, panel: Panel) -> None:
    from matplotlib.ticker import LogLocator

    if panel.y_scale == "log":
        axes.set_yscale("log")
    elif not any(series.style == "bars" for series in panel.series):
        axes.set_ylim(bottom=0)
    if panel.x_scale == "steps":
        values = sorted({x for series in panel.series for x in series.x})
        axes.set_xscale("log", base=2)
        axes.set_xticks(values, [f"{value:g}" for value in values])
        axes.minorticks_off()
    elif panel.x_scale == "log":
        axes.set_xscale("log")
        axes.margins(x=0.1)
    if panel.y_scale == "log":
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    for axis, scale in ((axes.yaxis, panel.y_scale), (axes.xaxis, panel.x_scale)):
        if scale == "log":
            axis.set_major_formatter("{x:g}")


def _draw_series(axes: Any, series: Series, color: str) -> None:
    match series.style:
        case "bars":
            bars = axes.barh(series.x, series.y, color=color, label=series.label)
            axes.bar_label(bars, [text_of(y) for y in series.y], padding=3, fontsize=8)
            axes.tick_params(axis="y", labelsize=8)
            axes.yaxis.set_inverted(True)
        case "dots":
            axes.plot(series.x, series.y, ".", markersize=7, color=color, label=series.label)
        case "step":
            axes.step(series.x, series.y, _DASHES[series.dash % len(_DASHES)], where="post", color=color, label=series.label)
        case "line":
            marker = "o" if len(series.x) <= _MARKED_POINTS else ""
            axes.plot(series.x, series.y, _DASHES[series.dash % len(_DASHES)], marker=marker, markersize=4, color=color, label=series.label)
