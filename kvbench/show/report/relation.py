"""Does less eviction error mean better results? A point per cell, and a rank correlation in words."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ...stats.bootstrap import Floats
from ...stats.panels import shorten
from ..panel import Panel
from ..scale import NOISE, scale_of
from ..words import as_words, enumerate_words, number
from .chart import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Mark, Picture, Stroke
from .look import Look

ERRORS = ("missed_mass", "eviction_cost")
RESAMPLES = 2_000
LEVEL = (2.5, 97.5)  # percentiles
LEAST = 4  # cells for a correlation
FEW_POLICIES = 5  # below, the interval of resampled policies is no guide
BUDGET = {
    "missed_mass": "A larger budget lowers the error and helps the result by itself;",
    "eviction_cost": "Eviction cost is the same at every budget, so it cannot follow what a budget does;",
}


@dataclass(frozen=True)
class Relation:
    """One eviction error (x) against one result (y). text: the correlation in words."""

    x: str
    y: str
    picture: Picture
    text: str


def relate(panel: Panel, looks: Mapping[str, Look], ident: str) -> list[Relation]:
    """Each eviction error that was measured against the main metric and kl."""
    asked = [(x, y) for x in ERRORS for y in panel.judged if x in panel.metrics and y not in ERRORS]
    return [
        Relation(x, y, _draw(panel, cells, x, y, looks, f"{ident}{place}"), _describe(panel, cells, x, y))
        for place, (x, y) in enumerate(asked)
        if len(cells := _cells(panel, x, y))
    ]


def cells_table(panel: Panel, found: Sequence[Relation]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a table with every cell in these charts."""
    names = [name for name in panel.metrics if name in {part for one in found for part in (one.x, one.y)}]
    lines = pd.concat([panel.of(name) for name in names] or [panel.measured.head(0)])
    lines = lines[lines["budget"].notna()]
    cells = lines.to_dict("records")
    means = {(cell["label"], int(cell["budget"]), cell["metric"]): cell["mean"] for cell in cells}
    body = []
    for label in panel.order:
        for budget in panel.budgets:
            values = [means.get((label, budget, name)) for name in names]
            texts = [
                "" if value is None else number(value, panel.about(name))
                for value, name in zip(values, names, strict=True)
            ]
            if any(texts):
                body.append([shorten(label), str(budget), *texts])
    return ["policy", "budget", *map(as_words, names)], body


def _cells(panel: Panel, x: str, y: str) -> pd.DataFrame:
    """label, budget, x, y, only_pins of every cell that has both, and in which something is evicted."""
    keys = ["label", "budget"]
    one, other = (panel.of(name)[[*keys, "mean", "only_pins", "n", "n_fit"]] for name in (x, y))
    cells = one.rename(columns={"mean": "x"}).merge(
        other.rename(columns={"mean": "y"})[[*keys, "y"]], on=keys
    )
    return cells[cells["budget"].notna() & (cells["n_fit"] < cells["n"])]


def _draw(
    panel: Panel, cells: pd.DataFrame, x_name: str, y_name: str, looks: Mapping[str, Look], ident: str
) -> Picture:
    """A marker per cell, larger for a larger budget."""
    below, about = panel.about(x_name), panel.about(y_name)
    x = scale_of(cells["x"].tolist(), (LEFT, WIDTH - RIGHT), below.limits)
    y = scale_of(cells["y"].tolist(), (HEIGHT - BOTTOM, TOP), about.limits, about.better != "higher")
    strokes = []
    for label in panel.order:
        mine = cells[cells["label"] == label].sort_values("budget")
        marks = []
        for cell in mine.to_dict("records"):
            tip = (
                f"{looks[label].text} at {cell['budget']}: {as_words(x_name)} {number(cell['x'], below)}, "
                f"{as_words(y_name)} {number(cell['y'], about)}"
            )
            size = 7 + 6 * panel.budgets.index(int(cell["budget"])) / max(1, len(panel.budgets) - 1)
            at = x.at(cell["x"]), y.at(cell["y"])
            marks.append(Mark(*at, bool(cell["only_pins"]), round(size, 1), tip))
        if marks:
            strokes.append(Stroke(looks[label], tuple(marks)))
    return Picture(
        ident, "cells", f"{as_words(y_name)} against {as_words(x_name)}", f"{about.better} is better",
        f"{as_words(x_name)} (lower is better)", x.marks, y.marks, strokes,
    )  # fmt: skip


def _describe(panel: Panel, cells: pd.DataFrame, x: str, y: str) -> str:
    """How closely the two go together, over all cells of real policies and within each budget."""
    return in_words(cells[cells["label"].isin(panel.candidates)], x, panel.about(y).better)


def in_words(cells: pd.DataFrame, x: str, better: str) -> str:
    """The rank correlation of cells (label, budget, x, y) in words. x: the error. better: of the result."""
    cells = cells.copy()
    cells[["x", "y"]] = (cells[["x", "y"]] / NOISE).round()  # rounding errors have no order
    places = f"{cells['label'].nunique()} policies at {cells['budget'].nunique()} budgets"
    who = f"{places}, brackets and cells that evict nothing left out"
    rho, low, high = spearman(cells["x"].to_numpy(), cells["y"].to_numpy(), cells["label"].tolist())
    n = len(cells)
    if not math.isfinite(rho):
        return f"n = {n} cells ({who}): too few, or all alike, for a rank correlation."
    good = 1 if better == "lower" else -1  # the sign that "less error, better result" has
    few = cells["label"].nunique() < FEW_POLICIES
    strength = "" if few else _strength(good * rho, good * low, good * high) + " "
    caution = f" Fewer than {FEW_POLICIES} policies show no relation, whatever the number." if few else ""
    return (
        f"{strength}Spearman's rank correlation is {rho:+.2f} [{low:+.2f},{high:+.2f}] over n = {n} cells "
        f"({who}).{caution} {BUDGET[x]} {_within(cells)}"
    )


def _within(cells: pd.DataFrame) -> str:
    """The correlation at each budget alone, where it is defined."""
    found = []
    for budget, part in cells.groupby("budget", sort=True):
        one = correlation(part["x"].to_numpy(), part["y"].to_numpy()) if len(part) >= LEAST else math.nan
        if math.isfinite(one):
            found.append(f"{one:+.2f} at {budget}")
    return (
        f"within one budget it is {enumerate_words(found)}."
        if found
        else f"within one budget there are too few policies (fewer than {LEAST}) for a correlation."
    )


def _strength(rho: float, low: float, high: float) -> str:
    """rho and its interval, positive where less error goes with better results."""
    low, high = min(low, high), max(low, high)
    if not low > 0 and not high < 0:
        return "No relation can be told: the interval includes 0."
    if high < 0:
        return "Less eviction error goes with worse results."
    size = "closely" if rho >= 0.8 else "clearly" if rho >= 0.6 else "loosely"
    return f"Less eviction error goes {size} with better results."


def spearman(x: Floats, y: Floats, who: Sequence[str]) -> tuple[float, float, float]:
    """The rank correlation with its 95% percentile bootstrap interval; NaN for too few cells.

    who: the policy of each cell. Policies are resampled, each with all of its cells: cells of one policy at
    several budgets are not independent.
    """
    rho = correlation(x, y) if len(x) >= LEAST else math.nan
    if not math.isfinite(rho):
        return math.nan, math.nan, math.nan
    mine = [[at for at, one in enumerate(who) if one == name] for name in dict.fromkeys(who)]
    places = np.full((len(mine), max(map(len, mine))), len(x))  # one behind the last: no cell
    for row, cells in zip(places, mine, strict=True):
        row[: len(cells)] = cells
    draws = places[np.random.default_rng(0).integers(0, len(mine), (RESAMPLES, len(mine)))]
    sides = (np.append(side, np.nan)[draws.reshape(RESAMPLES, -1)] for side in (x, y))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # draws in which one side is all alike have no correlation
        low, high = np.nanpercentile(_correlate(*sides), LEVEL)
    return rho, float(low), float(high)


def correlation(x: Floats, y: Floats) -> float:
    """Spearman's rank correlation; NaN where one side is all alike."""
    return float(_correlate(x[None], y[None])[0])


def _correlate(x: Floats, y: Floats) -> Floats:
    """Spearman's correlation of each row (row, n), NaN left out; NaN where a side is all alike."""
    ranks = [pd.DataFrame(side).rank(axis=1).to_numpy() for side in (x, y)]  # ties share their mean rank
    one, other = (rank - np.nanmean(rank, axis=1, keepdims=True) for rank in ranks)
    spread = np.sqrt(np.nansum(one**2, axis=1) * np.nansum(other**2, axis=1))
    with np.errstate(invalid="ignore"):
        return np.asarray(np.nansum(one * other, axis=1) / np.where(spread > 0, spread, np.nan))
