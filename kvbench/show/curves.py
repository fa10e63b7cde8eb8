"""A chart (see `chart`) in matplotlib: curves with intervals, and the legend that explains them."""

from __future__ import annotations

import math
import textwrap
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import (
    FixedFormatter,
    FixedLocator,
    FuncFormatter,
    LogLocator,
    NullFormatter,
    NullLocator,
)

from .canvas import GRID
from .chart import BUDGET, BudgetCurve, Chart, Level
from .scale import budget_labels, reads_better_in_logs
from .style import BOUND_MARKERS, GREY

FAINT = "#bbbbbb"


def draw_chart(axes: Axes, chart: Chart, terse: bool = False) -> None:
    """terse: numbers of this panel stay out of the labels."""
    for level in chart.levels:
        if level.style:
            _draw_full(axes, level, terse)
    single = len(chart.budgets) == 1  # points of one budget stand side by side
    for index, curve in enumerate(chart.curves):
        shift = 2 ** (0.8 * ((index + 0.5) / len(chart.curves) - 0.5)) if single else 1.0
        if curve.label in chart.faint:
            _draw_faint(axes, curve, shift)
        else:
            _draw_curve(axes, curve, shift)
    for level in chart.levels:
        if not level.style:
            text = level.name if terse else f"{level.name} {level.mean:.2f}"
            axes.axhline(level.mean, color=GREY, linewidth=0.8, linestyle=(0, (6, 3)), label=text, zorder=1)
    _set_scales(axes, chart)


def legend_keys(chart: Chart) -> list[Artist]:
    """For the legend: what the ways of drawing these curves mean."""
    hollow: dict[str, Any] = {"marker": "o", "markerfacecolor": "white", "markeredgecolor": GREY}
    keys: dict[str, Artist] = {
        "interval": Patch(color=GREY, alpha=0.25, linewidth=0, label="95% interval"),
        "attention": Line2D([], [], color=GREY, linestyle="--", label="reads attention"),
        "pins": Line2D([], [], linestyle="", label="only pins stay", **hollow),
        "faint": Line2D([], [], color=FAINT, linewidth=0.8, label=f"{len(chart.faint)} others"),
    }
    return [keys[note] for note in chart.notes]


def _draw_full(axes: Axes, level: Level, terse: bool) -> None:
    assert level.style is not None
    name = (
        f"{level.name} (≈{level.pairs:.0f} pairs)" if math.isfinite(level.pairs) and not terse else level.name
    )
    axes.axhline(level.mean, color=level.style.color, linewidth=level.style.width, label=name, zorder=2)
    if level.has_band:
        axes.axhspan(level.low, level.high, color=level.style.color, alpha=0.06, linewidth=0, zorder=0)


def _draw_curve(axes: Axes, curve: BudgetCurve, shift: float) -> None:
    """One curve with its band. shift: factor on the budgets as drawn."""
    look, budgets = curve.style, curve.budgets * shift
    shared: dict[str, Any] = {"color": look.color, "zorder": 2 if look.bracket else 3}
    marker = look.marker or (BOUND_MARKERS[look.line] if len(budgets) == 1 else "")
    (line,) = axes.plot(
        budgets, curve.mean, look.line, linewidth=look.width, marker=marker, markersize=6, **shared
    )
    name = textwrap.fill(curve.name, 30)
    line.set_label(f"{name} (bracket)" if curve.is_bracket else name)
    line.set_gid(curve.label)
    if len(budgets) > 1:
        axes.fill_between(budgets, curve.low, curve.high, color=look.color, alpha=0.05, linewidth=0, zorder=1)
        for edge in (curve.low, curve.high):  # without it, bands that overlap become one grey patch
            axes.plot(budgets, edge, color=look.color, linewidth=0.6, alpha=0.35, label="_edge", zorder=1)
    else:  # a band needs two budgets
        axes.vlines(budgets, curve.low, curve.high, linewidth=1.2, **shared)
    if curve.pinned.any() and look.marker:
        axes.plot(
            budgets[curve.pinned], curve.mean[curve.pinned], linestyle="", marker=look.marker, markersize=6,
            markerfacecolor="white", markeredgecolor=look.color, zorder=4,
        )  # fmt: skip


def _draw_faint(axes: Axes, curve: BudgetCurve, shift: float) -> None:
    """One of many: its course, and no name in the legend."""
    marker = "." if len(curve.budgets) == 1 else ""
    (line,) = axes.plot(
        curve.budgets * shift, curve.mean, "-", color=FAINT, linewidth=0.8, marker=marker, zorder=1,
        label=f"_{curve.name}",
    )  # fmt: skip
    line.set_gid(curve.label)


def _set_scales(axes: Axes, chart: Chart) -> None:
    """Ticks at the measured budgets; the vertical axis within the metric's limits."""
    axes.set_ylabel(chart.metric.label)
    axes.grid(axis="y", **GRID)
    axes.set_axisbelow(True)
    _set_upright(axes, chart)
    budgets = chart.budgets
    axes.set_xlabel(BUDGET)
    if not budgets:
        axes.set_xticks([])
        return
    axes.set_xscale("log", base=2)
    if len(budgets) == 1:
        axes.set_xlim(budgets[0] / 1.5, budgets[0] * 1.5)
    mark_values(axes.xaxis, budgets, budget_labels(budgets, math.log(budgets[-1] / budgets[0]) / 14))


def _set_upright(axes: Axes, chart: Chart) -> None:
    """The vertical axis: within the metric's limits; logarithmic where that reads better."""
    limits, means = chart.metric.limits, chart.means
    if limits is None:
        return
    least, most = float(means.min()), float(means.max())
    if limits[1] is None and reads_better_in_logs(means):
        if least < 1e-4 * most:  # rounding noise around 0 must not fill the axis: linear there
            axes.set_yscale("symlog", linthresh=1e-3 * most, linscale=0.5)
            axes.set_ylim(bottom=0)
        else:
            axes.set_yscale("log")
            name_ticks(axes.yaxis, most / least)
        return
    bottom, top = axes.get_ylim()
    if limits[0] is not None:
        bottom = max(bottom, limits[0] - 0.02 * (top - bottom))
    if limits[1] is not None:
        top = min(top, limits[1] + 0.02 * (top - bottom))
    axes.set_ylim(bottom, top)


def mark_values(axis: Axis, values: list[float], labels: list[str]) -> None:
    """Marks at these values, and nowhere else."""
    axis.set_major_locator(FixedLocator(values))
    axis.set_major_formatter(FixedFormatter(labels))
    axis.set_minor_locator(NullLocator())


def name_ticks(axis: Axis, factor: float) -> None:
    """Plain numbers at 1, 2, 5 of each decade of a logarithmic axis that spans less than two."""
    if factor < 100:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
