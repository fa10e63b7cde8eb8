"""Figures `budget-cost` and `head-costs`: what rankings of recorded tokens cost, by budget and by KV head."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from kvbench.contract.pins import parse_pins
from kvbench.errors import BadInput
from kvbench.show.kit import (
    BUDGET,
    FONT,
    GRID,
    WIDTH,
    Request,
    Style,
    add_axes,
    add_heading,
    name_ticks,
    new_figure,
    round_numbers,
    save,
    use_fonts,
)

from .recorded_costs import POINTS_PER_OCTAVE, Costs, by_budget, by_head, rank_folders

QUANTITIES = {
    "budget_cost": "−Rᵇ (adds up to\nthe eviction cost)",
    "missed_mass": "missed mass (0..1,\nlower is better)",
    "over_oracle": "missed mass over the\noracle's (lower is better)",
}
LEAST = 1e-3  # missed mass: less is cut off, or the end of the curve would fill the axis


def budget_cost(asked: Request) -> list[Path]:
    """-R^b of KVP and missed mass over all budgets, a column per folder of traces."""
    found, looks = rank_folders(asked, "budget-cost", asked.policies or ["all"])
    return draw_budget_cost(found, looks, asked, "budget-cost", ["budget_cost", "missed_mass"])


def draw_budget_cost(
    found: Sequence[Costs], looks: Mapping[str, Style], asked: Request, name: str, rows: Sequence[str]
) -> list[Path]:
    """A column per Costs. asked: for its head (None: the mean over all), pins, and folder of the files.
    rows: which of QUANTITIES."""
    tables = [by_budget(one, asked.head, rows) for one in found]
    pins = parse_pins(asked.pins or "none")
    fig = new_figure(WIDTH, 5.6 + 0.22 * math.ceil(len(looks) / 3))
    cells = add_axes(fig, len(rows), len(found), sharex="col", sharey="row")
    for line, quantity in zip(cells, rows, strict=True):
        for axes, table in zip(line, tables, strict=True):
            part = table[(table["quantity"] == quantity)]
            part = part[part["first_budget"] >= (pins.total if pins else 0)]  # before, only pins stay
            for spec in looks:
                _curve(axes, part[part["spec"] == spec], looks[spec])
            axes.set(xscale="log", yscale="linear" if quantity == "over_oracle" else "log")
            axes.grid(**GRID)
        line[0].set_ylabel(QUANTITIES[quantity], fontsize=FONT - 1)
        if quantity == "missed_mass":
            line[0].set_ylim(max(LEAST, line[0].get_ylim()[0]), 1.2)
    for axes, one in zip(cells[0], found, strict=True):
        axes.set_title(f"{one.folder}, n = {len(one.samples)} traces", fontsize=FONT - 1, loc="left")
    for axes, table in zip(cells[-1], tables, strict=True):
        name_ticks(axes.xaxis, table["budget"].max() / max(1, pins.total if pins else 1))
        axes.set_xlabel(BUDGET if len(found) == 1 else BUDGET.replace(" per KV head", "\nper KV head"))
    add_heading(fig, [found[0].title, f"{asked.head or 'mean over all KV heads'}; 95% interval over traces"])
    handles, labels = cells[0][0].get_legend_handles_labels()
    names = [f"{label} ({_totals(tables, label)})" for label in labels]
    _legend(fig, handles, names, "policy (its eviction cost: the sum of −Rᵇ over all budgets)")
    shown = pd.concat(tables).drop(columns="spec")
    parts = [name, *([asked.head] if asked.head else [])]
    return save(fig, asked.out, "-".join(parts), round_numbers(shown), compact=True)


def _legend(fig: Figure, handles: Sequence[Artist], labels: Sequence[str], title: str) -> None:
    """Below everything, in as many columns as fit."""
    fig.legend(
        handles, labels, loc="outside lower center", ncols=3 if max(map(len, labels)) < 34 else 2,
        frameon=False, fontsize=FONT - 2, title=title, title_fontsize=FONT - 2,
    )  # fmt: skip


def _curve(axes: Axes, part: pd.DataFrame, look: Style) -> None:
    x = part["budget"].to_numpy()
    axes.plot(
        x, part["mean"], look.line, color=look.color, linewidth=look.width, label=part["policy"].iloc[0],
        marker=look.marker, markersize=5, markevery=POINTS_PER_OCTAVE, zorder=2 if look.bracket else 3,
    )  # fmt: skip
    axes.fill_between(x, part["lo"], part["hi"], color=look.color, alpha=0.15, linewidth=0, zorder=1)


def _totals(tables: Sequence[pd.DataFrame], policy: str) -> str:
    costs = [table.loc[table["policy"] == policy, "eviction_cost"].iloc[0] for table in tables]
    return " and ".join(f"{cost:.3g}" for cost in costs)


def head_costs(asked: Request) -> list[Path]:
    """Eviction cost of every KV head: a map in the order of the layers, and curves sorted by cost."""
    found, looks = rank_folders(asked, "head-costs", asked.policies or ["all"])
    if len(found) > 1:
        raise BadInput(f"figure 'head-costs' shows one folder of traces, {len(found)} were given")
    table, names = by_head(found[0]), found[0].names
    order = table.groupby("spec", sort=False)["mean"].mean().sort_values().index
    per_layer = int(table["head"].max()) + 1
    fig = new_figure(WIDTH, 4.6 + 0.3 * len(order))
    upper, lower = add_axes(fig, 2, height_ratios=[0.5 + 0.3 * len(order), 3])[:, 0]
    grid = np.array([table[table["spec"] == spec]["mean"] for spec in order])
    image = upper.imshow(
        grid, aspect="auto", interpolation="none", cmap="viridis", norm=LogNorm(1, grid.max())
    )
    upper.set_yticks(range(len(order)), [names[spec] for spec in order], fontsize=FONT - 2)
    layers = range(0, grid.shape[1] // per_layer, 5)
    upper.set_xticks([layer * per_layer for layer in layers], [f"L{layer}" for layer in layers])
    upper.set_xlabel(f"KV head ({per_layer} per layer), in the order of the layers", fontsize=FONT - 1)
    bar = fig.colorbar(image, ax=upper)
    use_fonts(bar.ax)
    bar.set_label("eviction cost", fontsize=FONT - 1)
    bar.formatter = FuncFormatter(lambda value, _: f"{value:g}")
    bar.ax.yaxis.set_minor_formatter(NullFormatter())
    for spec, row in zip(order, grid, strict=True):
        look = looks[spec]
        lower.plot(
            np.arange(1, len(row) + 1), np.sort(row), look.line, color=look.color, linewidth=look.width,
            marker=look.marker, markersize=5, markevery=15, label=f"{names[spec]} ({row.mean():.3g})",
        )  # fmt: skip
    lower.set_yscale("log")
    name_ticks(lower.yaxis, 1)
    lower.set_xlabel("KV heads, each policy's own sorted by cost", fontsize=FONT - 1)
    lower.set_ylabel("eviction cost\n(lower is better)", fontsize=FONT - 1)
    lower.grid(axis="y", **GRID)
    n = f"{found[0].folder}, means over n = {len(found[0].samples)} traces"
    add_heading(fig, [f"{found[0].title}; {n}"])
    handles, labels = lower.get_legend_handles_labels()
    _legend(fig, handles, labels, "policy (mean over heads)")
    return save(fig, asked.out, "head-costs", round_numbers(table.drop(columns="spec")), compact=True)
