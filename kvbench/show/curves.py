"""The curves of one panel: policies against the absolute budget, with intervals, and what explains them."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
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

from ..contract.cell import FULL
from ..contract.metrics import describe
from ..stats.bootstrap import Floats
from ..stats.panels import shorten
from .canvas import GRID
from .footnotes import majority, only_pins
from .style import GREY, LOWER, UPPER, Style

CHOICE = ("accuracy", "acc_norm")  # what a majority rate can be compared with
BUDGET = "budget (KV pairs per KV head per layer)"


def draw_curves(axes: Axes, lines: pd.DataFrame, looks: Mapping[str, Style], terse: bool = False) -> None:
    """One metric of one panel (see kvbench.panels). terse: numbers of this panel stay out of the labels."""
    metric = str(lines["metric"].iloc[0])
    rest = lines[lines["policy"] != FULL]
    for line in lines[lines["policy"] == FULL].to_dict("records"):
        _draw_full(axes, line, looks[line["label"]], terse)
    order = _drawing_order(rest, looks)
    single = rest["budget"].nunique() == 1  # points of one budget stand side by side
    for index, label in enumerate(order):
        shift = 2 ** (0.8 * ((index + 0.5) / len(order) - 0.5)) if single else 1.0
        _draw_policy(axes, rest[rest["label"] == label].sort_values("budget"), looks[label], shift)
    rate = majority(lines) if metric in CHOICE else None
    if rate is not None:
        text = "majority rate" if terse else f"majority rate {rate[0]:.2f}"
        axes.axhline(rate[0], color=GREY, linewidth=0.8, linestyle=(0, (6, 3)), label=text, zorder=1)
    _scale(axes, lines, metric)


def curve_keys(rest: pd.DataFrame, looks: Mapping[str, Style]) -> list[Artist]:
    """For the legend: what the ways of drawing these policies' lines mean."""
    keys: list[Artist] = []
    if rest["lo"].notna().any():
        keys.append(Patch(color=GREY, alpha=0.25, linewidth=0, label="95% interval"))
    if any(looks[label].line == "--" for label in rest["label"]):
        keys.append(Line2D([], [], color=GREY, linestyle="--", label="reads attention"))
    if only_pins(rest).any():
        hollow: dict[str, Any] = {"marker": "o", "markerfacecolor": "white", "markeredgecolor": GREY}
        keys.append(Line2D([], [], linestyle="", label="only pins stay", **hollow))
    return keys


def _drawing_order(rest: pd.DataFrame, looks: Mapping[str, Style]) -> list[str]:
    """The legend's order: between the brackets, policies as they come."""
    labels = list(dict.fromkeys(rest["label"]))
    return sorted(labels, key=lambda label: {UPPER: 0, LOWER: 2}.get(looks[label].line, 1))


def _draw_full(axes: Axes, line: Mapping[Any, Any], look: Style, terse: bool) -> None:
    label = _full_label(line, terse)
    axes.axhline(line["mean"], color=look.color, linewidth=look.width, label=label, zorder=2)
    if math.isfinite(line["lo"]) and line["lo"] < line["hi"]:
        axes.axhspan(line["lo"], line["hi"], color=look.color, alpha=0.06, linewidth=0, zorder=0)


def _full_label(line: Mapping[Any, Any], terse: bool) -> str:
    name = "full cache" if line["label"] == FULL else str(line["label"])
    tokens = line["context_tokens"]
    return f"{name} (≈{tokens:.0f} pairs)" if math.isfinite(tokens) and not terse else name


def _draw_policy(axes: Axes, part: pd.DataFrame, look: Style, shift: float) -> None:
    """One curve with its band. shift: factor on the budgets as drawn."""
    budgets = part["budget"].to_numpy(dtype=float) * shift
    mean, low, high = (part[name].to_numpy(dtype=float) for name in ("mean", "lo", "hi"))
    label = str(part["label"].iloc[0])
    shared: dict[str, Any] = {"color": look.color, "zorder": 2 if look.bracket else 3}
    marker = look.marker or ({UPPER: "+", LOWER: "x"}[look.line] if len(part) == 1 else "")
    (curve,) = axes.plot(
        budgets, mean, look.line, linewidth=look.width, marker=marker, markersize=6, **shared
    )
    told = textwrap.fill(shorten(label), 30)
    curve.set_label(f"{told} (bracket)" if look.line in (LOWER, UPPER) else told)
    curve.set_gid(label)
    if len(part) > 1:
        axes.fill_between(budgets, low, high, color=look.color, alpha=0.05, linewidth=0, zorder=1)
        for edge in (low, high):  # without it, bands that overlap become one grey patch
            axes.plot(budgets, edge, color=look.color, linewidth=0.6, alpha=0.35, label="_edge", zorder=1)
    else:  # a band needs two budgets
        axes.vlines(budgets, low, high, linewidth=1.2, **shared)
    pinned = only_pins(part).to_numpy()
    if pinned.any() and look.marker:
        axes.plot(
            budgets[pinned], mean[pinned], linestyle="", marker=look.marker, markersize=6,
            markerfacecolor="white", markeredgecolor=look.color, zorder=4,
        )  # fmt: skip


def _scale(axes: Axes, lines: pd.DataFrame, metric: str) -> None:
    """Ticks at the measured budgets; the vertical axis within the metric's limits."""
    axes.set_ylabel(describe(metric).label)
    axes.grid(axis="y", **GRID)
    axes.set_axisbelow(True)
    _upright(axes, lines["mean"].to_numpy(dtype=float), describe(metric).limits)
    budgets = sorted({float(budget) for budget in lines["budget"].dropna()})
    axes.set_xlabel(BUDGET)
    if not budgets:
        axes.set_xticks([])
        return
    axes.set_xscale("log", base=2)
    if len(budgets) == 1:
        axes.set_xlim(budgets[0] / 1.5, budgets[0] * 1.5)
    axes.xaxis.set_major_locator(FixedLocator(budgets))
    axes.xaxis.set_major_formatter(FixedFormatter(_tick_labels(budgets)))
    axes.xaxis.set_minor_locator(NullLocator())


def _upright(axes: Axes, means: Floats, limits: tuple[float | None, float | None] | None) -> None:
    """The vertical axis: within the metric's limits; logarithmic where that reads better."""
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


def reads_better_in_logs(means: Floats) -> bool:
    """Positive numbers over a factor of 30, or over a factor of 3 when a few large ones would press half
    of all points into the lowest sixth of a linear axis."""
    least, most = float(means.min()), float(means.max())
    pressed = float(np.median(means)) - least < (most - least) / 6
    return least > 0 and (most > 30 * least or (most > 3 * least and pressed))


def name_ticks(axis: Axis, factor: float) -> None:
    """Plain numbers at 1, 2, 5 of each decade of a logarithmic axis that spans less than two."""
    if factor < 100:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())


def _tick_labels(budgets: Sequence[float]) -> list[str]:
    """Numbers, left out where they would run into the one before."""
    room = math.log(budgets[-1] / budgets[0]) / 14
    labels: list[str] = []
    last = -math.inf
    for budget in budgets:
        fits = math.log(budget) - last >= room
        labels.append(f"{budget:.0f}" if fits else "")
        last = math.log(budget) if fits else last
    return labels
