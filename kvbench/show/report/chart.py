"""The curves of one metric as numbers for an inline SVG, and the table that says the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import pandas as pd

from ...contract.metrics import Metric, describe
from ...stats.compare import CHOICE
from ...store.frame import metrics_of
from ..footnotes import majority
from ..table import pivot
from .look import Look
from .panel import Panel
from .scale import Scale, budget_scale, scale_of

WIDTH, HEIGHT = 480, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 12, 48
ROW = 24  # of a chart with one line per policy
NAMES = 170  # room for the policies' names there

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Mark:
    """One point. hollow: only pins stay. size: diameter in pixels. told: what it is, in words."""

    x: float
    y: float
    hollow: bool = False
    size: float = 8
    told: str = ""


@dataclass(frozen=True)
class Curve:
    """What is drawn of one label. line, band and edges are the points of an SVG polyline or polygon."""

    look: Look
    marks: tuple[Mark, ...]
    line: str = ""
    band: str = ""
    edges: tuple[str, ...] = ()


@dataclass(frozen=True)
class Level:
    """A horizontal line across the chart. band: (top, height), or None."""

    look: Look | None
    y: float
    text: str
    band: tuple[float, float] | None = None


@dataclass(frozen=True)
class Chart:
    """One figure. x and y: (pixel, text) of the marks on the axes. kind: "curves", "dots" or "cells"."""

    ident: str
    kind: str
    title: str
    unit: str
    x_label: str
    x: list[tuple[float, str]]
    y: list[tuple[float, str]]
    curves: list[Curve]
    levels: list[Level] = field(default_factory=list)
    height: float = HEIGHT
    left: float = LEFT
    header: list[str] = field(default_factory=list)
    body: list[list[str]] = field(default_factory=list)


def chart_of(panel: Panel, metric: str, looks: dict[str, Look], ident: str) -> Chart:
    """A metric against the budget, or per policy where the budget makes no difference."""
    lines = panel.of(metric)
    rest = lines[~lines["label"].isin(panel.full)]
    constant = rest.groupby("label")["mean"].nunique().max() == 1
    if rest["budget"].nunique() > 1 and constant:
        return _dots(panel, metric, looks, ident)
    return _curves(panel, metric, looks, ident)


def _curves(panel: Panel, metric: str, looks: dict[str, Look], ident: str) -> Chart:
    lines = panel.of(metric)
    rate = majority(lines) if metric in CHOICE else None
    y = _values_scale(lines, metric, (HEIGHT - BOTTOM, TOP), [rate[0]] if rate else [])
    x = budget_scale(panel.budgets or [1], (LEFT, WIDTH - RIGHT))
    drawn = [label for label in panel.order if label not in panel.full and (lines["label"] == label).any()]
    curves = []
    for place, label in enumerate(drawn):
        mine = lines[lines["label"] == label].sort_values("budget")
        shift = 0.0 if len(panel.budgets) > 1 else (place - (len(drawn) - 1) / 2) * 24
        curves.append(_curve(mine, looks[label], x, y, shift))
    levels = [_full(line, looks[line["label"]], y) for _, line in lines.iterrows() if pd.isna(line["budget"])]
    if rate is not None:
        levels.append(Level(None, y.at(rate[0]), f"majority rate {rate[0]:.2f}"))
    header, body = pivot(lines, metric)
    about = panel.about(metric)
    return Chart(
        ident, "curves", about.name.replace("_", " "), _unit(about),
        "budget (KV pairs per KV head per layer)", x.marks if panel.budgets else [], y.marks, curves, levels,
        header=header, body=body,
    )  # fmt: skip


def _curve(mine: pd.DataFrame, look: Look, x: Scale, y: Scale, shift: float) -> Curve:
    budgets = [x.at(float(budget)) + shift for budget in mine["budget"]]
    middle, low, high = (
        [y.at(value) if math.isfinite(value) else math.nan for value in mine[name]]
        for name in ("mean", "lo", "hi")
    )
    marks = tuple(
        Mark(place, height, bool(pinned), 0 if look.bound else 8)
        for place, height, pinned in zip(budgets, middle, mine["only_pins"], strict=True)
    )
    line = _points(list(zip(budgets, middle, strict=True)))
    sides = [
        [(place, value) for place, value in zip(budgets, ends, strict=True) if math.isfinite(value)]
        for ends in (low, high)
    ]
    if len(budgets) == 1:
        bars = [
            _points([(place, top), (place, bottom)]) for (place, top), (_, bottom) in zip(*sides, strict=True)
        ]
        return Curve(look, tuple(Mark(m.x, m.y, m.hollow, 8) for m in marks), "", "", tuple(bars))
    return Curve(look, marks, line, _points(sides[0] + sides[1][::-1]), tuple(map(_points, sides)))


def _full(line: pd.Series, look: Look, y: Scale) -> Level:
    band = None
    if math.isfinite(line["lo"]) and line["lo"] < line["hi"]:
        top, bottom = y.at(line["hi"]), y.at(line["lo"])
        band = (top, round(bottom - top, 2))
    return Level(look, y.at(line["mean"]), "full cache", band)


def _dots(panel: Panel, metric: str, looks: dict[str, Look], ident: str) -> Chart:
    """One line per policy, the best on top: its mean with its interval."""
    lines = panel.of(metric).drop_duplicates("label")
    lines = lines.sort_values("mean", ascending=panel.about(metric).better == "lower", kind="stable")
    bottom = TOP + ROW * len(lines)
    x = _values_scale(lines, metric, (NAMES, WIDTH - RIGHT), [])
    curves, names = [], []
    for place, (_, line) in enumerate(lines.iterrows()):
        height = TOP + ROW * (place + 0.5)
        ends = [(x.at(line[end]), height) for end in ("lo", "hi") if math.isfinite(line[end])]
        look = looks[line["label"]]
        curves.append(Curve(look, (Mark(x.at(line["mean"]), height, False, 8),), "", "", (_points(ends),)))
        names.append((height, look.text))
    header, body = pivot(panel.of(metric), metric)
    about = panel.about(metric)
    return Chart(
        ident, "dots", about.name.replace("_", " "), f"{_unit(about)}; the same at every budget", "",
        x.marks, names, curves, height=bottom + BOTTOM - 20, left=NAMES, header=header, body=body,
    )  # fmt: skip


def _values_scale(
    lines: pd.DataFrame, metric: str, pixels: tuple[float, float], more: Sequence[float]
) -> Scale:
    """The axis of a metric; logarithmic only where less is better: there small values are what counts."""
    about = describe(metric, metrics_of(lines))
    values = [float(v) for name in ("mean", "lo", "hi") for v in lines[name] if math.isfinite(v)]
    return scale_of([*values, *more], pixels, about.limits, may_log=about.better != "higher")


def _unit(about: Metric) -> str:
    """Unit, direction and meaning."""
    direction = "" if about.better == "none" else f"{about.better} is better"
    return ", ".join(part for part in (about.unit, direction) if part)


def _points(points: Points) -> str:
    return " ".join(f"{x:g},{y:g}" for x, y in points)
