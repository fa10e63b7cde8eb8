"""Charts of a page: what `show.chart` says, in the pixels of an inline SVG, and the table that says the same.

Figures of matplotlib are not put into the page: here a curve can be switched off, has a dark colour too, and
is a few hundred bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...contract.metrics import Metric
from ...stats.bootstrap import Floats
from ..chart import BUDGET, BudgetCurve, Chart, Level, chart_of
from ..panel import Panel
from ..scale import Scale, budget_scale, scale_of
from ..table import pivot
from ..words import as_words
from .look import Look

WIDTH, HEIGHT = 480, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 12, 48
ROW = 24  # of a chart with one line per policy
NAMES = 170  # room for the policies' names there
DOT = 8  # diameter of a marker


@dataclass(frozen=True)
class Mark:
    """One point. hollow: only pins stay. size: diameter in pixels. tip: what it is, in words."""

    x: float
    y: float
    hollow: bool = False
    size: float = DOT
    tip: str = ""


@dataclass(frozen=True)
class Stroke:
    """What is drawn of one label. line, band and edges are the points of an SVG polyline or polygon."""

    look: Look
    marks: tuple[Mark, ...]
    line: str = ""
    band: str = ""
    edges: tuple[str, ...] = ()


@dataclass(frozen=True)
class Guide:
    """A horizontal line across the picture. band: (top, height), or None."""

    look: Look | None
    y: float
    text: str
    band: tuple[float, float] | None = None


@dataclass(frozen=True)
class Picture:
    """One figure. x and y: (pixel, text) of the marks on the axes. kind: "curves", "dots" or "cells"."""

    ident: str
    kind: str
    title: str
    unit: str
    x_label: str
    x: list[tuple[float, str]]
    y: list[tuple[float, str]]
    strokes: list[Stroke]
    guides: list[Guide] = field(default_factory=list)
    height: float = HEIGHT
    left: float = LEFT
    header: list[str] = field(default_factory=list)
    body: list[list[str]] = field(default_factory=list)


def picture_of(panel: Panel, metric: str, looks: Mapping[str, Look], ident: str) -> Picture:
    """A metric against the budget, or per policy where the budget makes no difference."""
    lines = panel.of(metric)
    chart = chart_of(lines, panel.looks)
    draw = _draw_dots if chart.constant else _draw_curves
    return draw(chart, looks, ident, *pivot(lines, metric))


def _draw_curves(
    chart: Chart, looks: Mapping[str, Look], ident: str, header: list[str], body: list[list[str]]
) -> Picture:
    y = _value_scale(chart.values, chart.metric, (HEIGHT - BOTTOM, TOP))
    x = budget_scale(chart.budgets or [1], (LEFT, WIDTH - RIGHT))
    strokes = []
    for place, curve in enumerate(chart.curves):
        shift = 0.0 if len(chart.budgets) > 1 else (place - (len(chart.curves) - 1) / 2) * ROW
        strokes.append(_stroke(curve, looks[curve.label], x, y, shift))
    guides = [_guide(level, looks, y) for level in chart.levels]
    return Picture(
        ident, "curves", as_words(chart.metric.name), _unit(chart.metric), BUDGET,
        x.marks if chart.budgets else [], y.marks, strokes, guides, header=header, body=body,
    )  # fmt: skip


def _stroke(curve: BudgetCurve, look: Look, x: Scale, y: Scale, shift: float) -> Stroke:
    places = [x.at(float(budget)) + shift for budget in curve.budgets]
    single = len(places) == 1
    marks = tuple(
        Mark(place, y.at(mean), bool(pinned), 0 if look.bound and not single else DOT)
        for place, mean, pinned in zip(places, curve.mean, curve.pinned, strict=True)
    )
    low, high = (_ends(places, ends, y) for ends in (curve.low, curve.high))
    if single:
        return Stroke(look, marks, edges=tuple(_points([*pair]) for pair in zip(low, high, strict=True)))
    line = _points([(mark.x, mark.y) for mark in marks])
    return Stroke(look, marks, line, _points(low + high[::-1]), (_points(low), _points(high)))


def _ends(places: Sequence[float], values: Floats, y: Scale) -> list[tuple[float, float]]:
    """Where intervals end, without those that are not there."""
    return [(place, y.at(value)) for place, value in zip(places, values, strict=True) if math.isfinite(value)]


def _guide(level: Level, looks: Mapping[str, Look], y: Scale) -> Guide:
    if level.style is None:
        return Guide(None, y.at(level.mean), f"{level.name} {level.mean:.2f}")
    band = None
    if level.has_band:
        top, bottom = y.at(level.high), y.at(level.low)
        band = (top, round(bottom - top, 2))
    return Guide(looks[level.label], y.at(level.mean), level.name, band)


def _draw_dots(
    chart: Chart, looks: Mapping[str, Look], ident: str, header: list[str], body: list[list[str]]
) -> Picture:
    """One line per policy, the best on top: its mean with its interval."""
    dots = [(c.label, c.mean[0], c.low[0], c.high[0]) for c in chart.curves]
    dots += [(level.label, level.mean, level.low, level.high) for level in chart.levels if level.style]
    dots.sort(key=lambda dot: dot[1] if chart.metric.better == "lower" else -dot[1])
    x = _value_scale(chart.values, chart.metric, (NAMES, WIDTH - RIGHT))
    strokes, names = [], []
    for place, (label, mean, *ends) in enumerate(dots):
        height = TOP + ROW * (place + 0.5)
        line = _points([(x.at(end), height) for end in ends if math.isfinite(end)])
        strokes.append(Stroke(looks[label], (Mark(x.at(mean), height),), edges=(line,)))
        names.append((height, looks[label].text))
    bottom = TOP + ROW * len(dots)
    return Picture(
        ident, "dots", as_words(chart.metric.name), f"{_unit(chart.metric)}; the same at every budget", "",
        x.marks, names, strokes, height=bottom + BOTTOM - 20, left=NAMES, header=header, body=body,
    )  # fmt: skip


def _value_scale(values: Sequence[float], metric: Metric, pixels: tuple[float, float]) -> Scale:
    """The axis of a metric; logarithmic only where less is better: there small values are what counts."""
    return scale_of(values, pixels, metric.limits, may_log=metric.better != "higher")


def _unit(metric: Metric) -> str:
    """Unit and direction."""
    direction = "" if metric.better == "none" else f"{metric.better} is better"
    return ", ".join(part for part in (metric.unit, direction) if part)


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:g},{y:g}" for x, y in points)
