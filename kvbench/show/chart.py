"""What a figure of one metric shows, as numbers: figures and pages draw the same curves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..contract.cell import FULL
from ..contract.metrics import Metric, describe
from ..stats.bootstrap import Floats
from ..stats.compare import CHOICE
from ..stats.panels import shorten
from ..store.frame import metrics_of
from .footnotes import majority, only_pins
from .style import LOWER, UPPER, Style

MOST, BEST = 14, 10  # with more curves than MOST only the BEST of them keep their colours
BUDGET = "budget (KV pairs per KV head per layer)"


@dataclass(frozen=True)
class BudgetCurve:
    """One policy against the budget, budgets ascending.

    name: for display. budgets, mean, low, high: (n,), low and high NaN where there is no interval.
    pinned: (n,) bool, where only pinned tokens stay.
    """

    label: str
    name: str
    style: Style
    budgets: Floats
    mean: Floats
    low: Floats
    high: Floats
    pinned: NDArray[np.bool_]

    @property
    def is_bracket(self) -> bool:
        return self.style.line in (LOWER, UPPER)

    @cached_property
    def constant(self) -> bool:
        """Whether the budget makes no difference."""
        return len(set(self.mean)) == 1


@dataclass(frozen=True)
class Level:
    """A horizontal line: a full cache, or the majority rate, which has neither label nor style.

    pairs: the mean number of cached pairs, NaN where that is not known.
    """

    label: str
    name: str
    style: Style | None
    mean: float
    low: float = math.nan
    high: float = math.nan
    pairs: float = math.nan

    @property
    def has_band(self) -> bool:
        return math.isfinite(self.low) and self.low < self.high


@dataclass(frozen=True)
class Chart:
    """One metric of one panel. curves: policies as they come, between the upper and the lower bracket."""

    metric: Metric
    curves: tuple[BudgetCurve, ...]
    levels: tuple[Level, ...]

    @property
    def budgets(self) -> list[float]:
        """Every measured budget, ascending."""
        return sorted({float(budget) for curve in self.curves for budget in curve.budgets})

    @cached_property
    def faint(self) -> frozenset[str]:
        """Labels of curves that are grey and unnamed: with more than MOST policies, all but the BEST.

        By the mean over the budgets; the table has every policy.
        """
        policies = [curve for curve in self.curves if not curve.is_bracket]
        if len(policies) <= MOST:
            return frozenset()
        sign = -1 if self.metric.better == "higher" else 1
        policies.sort(key=lambda curve: sign * float(curve.mean.mean()))
        return frozenset(curve.label for curve in policies[BEST:])

    @property
    def means(self) -> Floats:
        """Of curves and full caches, in no order."""
        full = [level.mean for level in self.levels if level.style]
        return np.concatenate([np.array(full, dtype=float), *(curve.mean for curve in self.curves)])

    @property
    def values(self) -> list[float]:
        """Whatever is drawn and finite: means, ends of intervals, levels."""
        levels = [value for level in self.levels for value in (level.mean, level.low, level.high)]
        parts = [part for curve in self.curves for part in (curve.mean, curve.low, curve.high)]
        return [float(value) for value in np.concatenate([levels, *parts]) if math.isfinite(value)]

    @property
    def constant(self) -> bool:
        """Whether the budget makes no difference to any policy."""
        return len(self.budgets) > 1 and all(curve.constant for curve in self.curves)

    @property
    def notes(self) -> list[str]:
        """Ways of drawing that a reader must be told: "interval", "attention", "pins", "faint"."""
        found = {
            "interval": any((~np.isnan(curve.low)).any() for curve in self.curves),
            "attention": any(curve.style.line == "--" for curve in self.curves),
            "pins": any(curve.pinned.any() for curve in self.curves),
            "faint": bool(self.faint),
        }
        return [name for name, there in found.items() if there]


def chart_of(lines: pd.DataFrame, looks: Mapping[str, Style]) -> Chart:
    """The chart of aggregated lines of one metric and panel that have a number. looks: by label."""
    metric = describe(str(lines["metric"].iloc[0]), metrics_of(lines))
    full = lines[lines["policy"] == FULL]
    levels = [_full_level(line, looks[line["label"]]) for line in full.to_dict("records")]
    rate = majority(lines) if metric.name in CHOICE else None
    if rate is not None:
        levels.append(Level("", "majority rate", None, rate[0]))
    rest = lines[lines["policy"] != FULL]
    labels = list(dict.fromkeys(rest["label"]))
    labels.sort(key=lambda label: {UPPER: 0, LOWER: 2}.get(looks[label].line, 1))
    curves = tuple(_curve(rest[rest["label"] == label], looks[label]) for label in labels)
    return Chart(metric, curves, tuple(levels))


def _full_level(line: Mapping[Any, Any], look: Style) -> Level:
    label = str(line["label"])
    numbers = [float(line[name]) for name in ("mean", "lo", "hi", "context_tokens")]
    return Level(label, display_name(label), look, *numbers)


def display_name(label: str) -> str:
    return "full cache" if label == FULL else shorten(label)


def _curve(mine: pd.DataFrame, look: Style) -> BudgetCurve:
    mine = mine.sort_values("budget")
    label = str(mine["label"].iloc[0])
    budgets, mean, low, high = (mine[name].to_numpy(dtype=float) for name in ("budget", "mean", "lo", "hi"))
    pinned = only_pins(mine).to_numpy(dtype=bool)
    return BudgetCurve(label, display_name(label), look, budgets, mean, low, high, pinned)
