"""Axes: which ones are logarithmic, which values are marked, and where a value lies on a page's chart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..stats.bootstrap import Floats

WIDE = 30  # values whose largest is more times their smallest go on a logarithmic axis
NOISE = 1e-5  # what the order of a batch may change in float32: values so close are equal
NOTHING = 1e-4  # of the largest value: what is smaller is drawn as nothing, on a logarithmic axis
GAP = 0.07  # share of such an axis that lies between "nothing" and the values


@dataclass(frozen=True)
class Scale:
    """An axis from low to high, drawn from pixel `first` to `last`.

    log: logarithmic. nothing: values below low (rounding noise around 0) are drawn at `first`, and the
    values from low on begin a gap away. names: marks that are given, each (value, text).
    """

    low: float
    high: float
    first: float
    last: float
    log: bool = False
    nothing: bool = False
    names: tuple[tuple[float, str], ...] | None = None

    def at(self, value: float) -> float:
        """The pixel of a value; what lies outside is drawn at the end."""
        if self.nothing and value < self.low:
            return self.first
        value = min(max(value, self.low), self.high)
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        share = GAP + (1 - GAP) * share if self.nothing else share
        return round(self.first + share * (self.last - self.first), 2)

    @property
    def marks(self) -> list[tuple[float, str]]:
        """(pixel, text) of each mark."""
        if self.names is not None:
            return [(self.at(value), text) for value, text in self.names]
        values = _decades(self.low, self.high) if self.log else _steps(self.low, self.high)
        marks = [(self.at(value), f"{value:g}") for value in values]
        return [(self.first, "≈0"), *marks] if self.nothing else marks


def scale_of(
    values: Sequence[float],
    pixels: tuple[float, float],
    limits: tuple[float | None, float | None] | None = None,
    may_log: bool = True,
) -> Scale:
    """The axis for these values. limits: of the metric, which the axis does not leave by more than a hair."""
    least, most = min(values), max(values)
    low = min((value for value in values if value > NOTHING * most), default=most)
    if may_log and least >= 0 and most > WIDE * low:
        return Scale(low / 1.15, most * 1.15, *pixels, log=True, nothing=least < low)
    room = (most - least) * 0.06 or abs(most) * 0.1 or 0.5
    low, high = least - room, most + room
    hair = 0.03 * (high - low)
    if limits is not None:
        low = low if limits[0] is None else max(low, limits[0] - hair)
        high = high if limits[1] is None else min(high, limits[1] + hair)
    return Scale(low, high, *pixels)


def budget_scale(budgets: Sequence[float], pixels: tuple[float, float]) -> Scale:
    """Budgets on a logarithmic axis, each marked where its number has room."""
    low, high = min(budgets), max(budgets)
    edge = 1.5 if low == high else (high / low) ** 0.03
    room = math.log(high * edge / (low / edge)) / 11
    names = tuple(zip(budgets, budget_labels(budgets, room), strict=True))
    return Scale(low / edge, high * edge, *pixels, log=True, names=names)


def budget_labels(budgets: Sequence[float], room: float) -> list[str]:
    """The numbers of ascending budgets, left out where one would run into the one before.

    room: what a number needs of a logarithmic axis (natural logarithm).
    """
    labels: list[str] = []
    last = -math.inf
    for budget in budgets:
        fits = math.log(budget) - last >= room
        labels.append(f"{budget:.0f}" if fits else "")
        last = math.log(budget) if fits else last
    return labels


def reads_better_in_logs(means: Floats) -> bool:
    """Positive numbers over a factor of 30, or over a factor of 3 when a few large ones would press half
    of all points into the lowest sixth of a linear axis: the rule of figures, which have no axis that
    begins at "nothing"."""
    least, most = float(means.min()), float(means.max())
    pressed = float(np.median(means)) - least < (most - least) / 6
    return least > 0 and (most > WIDE * least or (most > 3 * least and pressed))


def _steps(low: float, high: float) -> list[float]:
    """Round values within the axis, six or seven at most."""
    power = 10.0 ** math.floor(math.log10((high - low) / 6))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= (high - low) / 6)
    first = math.ceil(low / step - 1e-9)
    return [float(f"{step * index:.9g}") for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _decades(low: float, high: float) -> list[float]:
    """Powers of ten within the axis, and their multiples where those are few."""
    span = math.log10(high / low)
    factors = (1,) if span > 2.5 else (1, 3) if span > 1.5 else (1, 2, 5)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values = [float(f"{10.0**power * factor:.3g}") for power in powers for factor in factors]
    inside = [value for value in values if low <= value <= high]
    return inside if len(inside) <= 7 else inside[:: math.ceil(len(inside) / 7)]
