"""Figures `budget-cost` and `head-costs`: what rankings of recorded tokens cost, by budget and by KV head."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from .bootstrap import Floats, Measured, intervals, measured
from .canvas import FONT, GRID, RC, WIDTH, heading, save, short_numbers
from .curves import BUDGET, name_ticks
from .errors import BadInput
from .figures import TRACES, Request, inputs
from .heads import budget_costs, find_head, head_name, missed_masses
from .panels import short
from .progress import progress
from .ranked import RecordedRanker, boundary
from .runner import style_of
from .style import Style, styles
from .trace import TraceSet

HINT = "make one with kvbench trace --task ... --samples 16 --out FOLDER"
POINTS_PER_OCTAVE = 4  # of budgets that are averaged into one point
QUANTITIES = {
    "budget_cost": "−Rᵇ (adds up to\nthe eviction cost)",
    "missed_mass": "missed mass (0..1,\nlower is better)",
}


@dataclass(frozen=True)
class Costs:
    """What rankings cost. folder: of the traces, by name. samples: ids of the traces, ascending.

    points: {spec: per trace QUANTITIES, averaged over the budgets of a point, (quantity, layer, kv_head,
    point)}; longer traces have more points. totals: {spec: eviction cost (trace, layer, kv_head)}.
    """

    folder: str
    title: str
    samples: list[str]
    points: dict[str, list[Floats]]
    totals: dict[str, Floats]


def ranked_costs(asked: Request, name: str, specs: Sequence[str]) -> tuple[list[Costs], dict[str, Style]]:
    """Rank the traces of all given folders; and how the policies are drawn. Raises: KvbenchError."""
    found = []
    looks: dict[str, Style] = {}
    for path in inputs(asked, name, TRACES, [], HINT):
        traces = TraceSet(path)
        chosen = sorted(list(traces)[: asked.limit], key=lambda trace: trace.info.id)
        if not chosen:
            raise BadInput(f"{path} holds no trace yet: record some with kvbench trace")
        ranker = RecordedRanker.open(traces, specs, asked.pins or "none")
        looks = styles(ranker.specs, style_of(ranker.policies))
        points: dict[str, list[Floats]] = {spec: [] for spec in ranker.specs}
        totals: dict[str, list[Floats]] = {spec: [] for spec in ranker.specs}
        with progress(True, len(chosen), "traces") as advance:
            for trace in chosen:
                (one,) = ranker.rank(trace, boundary(trace))
                for spec in ranker.specs:
                    costs = budget_costs(one.orders[spec], one.utility)
                    both = torch.stack([costs, missed_masses(one.orders[spec], one.utility)])
                    points[spec].append(_averaged(both.numpy()))
                    totals[spec].append(costs.sum(-1).numpy())
                advance(trace.info.task)
        rules = f"future from the question on, pins {asked.pins or 'none'}"
        title = f"{traces.header['model']}, {rules}"
        samples = [trace.info.id for trace in chosen]
        stacked = {spec: np.stack(costs) for spec, costs in totals.items()}
        found.append(Costs(traces.folder.name, title, samples, points, stacked))
    return found, looks


def budget_edges(longest: int) -> list[int]:
    """The first budget of every point, and the one after the last: whole numbers near 2^(k/4), so that
    neighbouring points are about equally far apart on a logarithmic axis."""
    powers = np.arange(int(np.log2(longest + 1) * POINTS_PER_OCTAVE) + 1) / POINTS_PER_OCTAVE
    return [int(edge) for edge in np.unique(np.round(2.0**powers).astype(int))]


def _averaged(costs: Floats) -> Floats:
    """Means over the budgets of each point that all belong to it. (..., n) -> (..., point)."""
    edges = budget_edges(costs.shape[-1])
    sums = np.add.reduceat(costs[..., : edges[-1] - 1], np.array(edges[:-1]) - 1, axis=-1)
    return np.asarray(sums / np.diff(edges))


def budget_cost(asked: Request) -> list[Path]:
    """-R^b of KVP and missed mass over all budgets, a column per folder of traces."""
    found, looks = ranked_costs(asked, "budget-cost", asked.policies or ["all"])
    return draw_budget_cost(found, looks, asked, "budget-cost")


def draw_budget_cost(
    found: Sequence[Costs], looks: Mapping[str, Style], asked: Request, name: str
) -> list[Path]:
    """One panel per Costs. asked: for its head (None: the mean over all) and folder of the files."""
    tables = [_by_budget(one, asked.head) for one in found]
    where = asked.head or "mean over all KV heads"
    with matplotlib.rc_context(RC):
        height = 5.6 + 0.22 * math.ceil(len(looks) / 3)
        fig = Figure(figsize=(WIDTH, height), layout="constrained")
        cells = fig.subplots(len(QUANTITIES), len(found), squeeze=False, sharex="col", sharey="row")
        for row, (quantity, label) in zip(cells, QUANTITIES.items(), strict=True):
            for axes, table in zip(row, tables, strict=True):
                part = table[table["quantity"] == quantity]
                for spec in looks:
                    _curve(axes, part[part["spec"] == spec], looks[spec])
                axes.set(xscale="log", yscale="log")
                axes.grid(**GRID)
            row[0].set_ylabel(label, fontsize=FONT - 1)
            if quantity == "missed_mass":
                row[0].set_ylim(1e-3, 1.2)
        for axes, one in zip(cells[0], found, strict=True):
            axes.set_title(f"{one.folder}, n = {len(one.samples)} traces", fontsize=FONT - 1, loc="left")
        for axes in cells[-1]:
            axes.set_xlabel(BUDGET if len(found) == 1 else BUDGET.replace(" per KV head", "\nper KV head"))
        heading(fig, [found[0].title, f"{where}; 95% interval over traces"])
        handles, labels = cells[0][0].get_legend_handles_labels()
        told = [f"{label} ({_totals(tables, label)})" for label in labels]
        fig.legend(
            handles, told, loc="outside lower center", ncols=3, frameon=False, fontsize=FONT - 2,
            title="policy (its eviction cost: the sum of −Rᵇ over all budgets)", title_fontsize=FONT - 2,
        )  # fmt: skip
    shown = pd.concat(tables).drop(columns="spec")
    parts = [name, *([asked.head] if asked.head else [])]
    return save(fig, asked.out, "-".join(parts), short_numbers(shown), compact=True)


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


def _by_budget(costs: Costs, head: str | None) -> pd.DataFrame:
    """Means over heads, with intervals over traces; points that less than half of the traces are long
    enough for are left out."""
    longest = max(part.shape[-1] for part in next(iter(costs.points.values())))
    spans = list(enumerate(pairwise(budget_edges(2**20)[: longest + 1])))
    lines: list[dict[str, Any]] = []
    items = []
    for spec, parts in costs.points.items():
        place = find_head(head, parts[0].shape[1:3]) if head else (slice(None), slice(None))
        flat = [part[:, *place].reshape(len(QUANTITIES), -1, part.shape[-1]).mean(1) for part in parts]
        total = float(costs.totals[spec][:, *place].mean())
        for (index, quantity), (point, (low, high)) in product(enumerate(QUANTITIES), spans):
            long = [i for i, part in enumerate(flat) if part.shape[-1] > point]
            if 2 * len(long) < len(flat):
                continue
            values = np.array([flat[i][index, point] for i in long])
            items.append(measured([costs.samples[i] for i in long], values))
            names = {"traces": costs.folder, "policy": short(spec), "spec": spec, "quantity": quantity}
            budgets = {"budget": (low + high - 1) / 2, "first_budget": low, "last_budget": high - 1}
            numbers = {"mean": items[-1].estimate, "n": len(long), "eviction_cost": total}
            lines.append(names | budgets | numbers)
    return _with_bounds(lines, items)


def _with_bounds(lines: list[dict[str, Any]], items: list[Measured]) -> pd.DataFrame:
    bounds = intervals(items)
    return pd.DataFrame(lines).assign(lo=[low for low, _ in bounds], hi=[high for _, high in bounds])


def head_costs(asked: Request) -> list[Path]:
    """Eviction cost of every KV head: a map in the order of the layers, and curves sorted by cost."""
    found, looks = ranked_costs(asked, "head-costs", asked.policies or ["all"])
    if len(found) > 1:
        raise BadInput(f"figure 'head-costs' shows one folder of traces, {len(found)} were given")
    table = _by_head(found[0])
    order = table.groupby("spec", sort=False)["mean"].mean().sort_values().index
    per_layer = int(table["head"].max()) + 1
    with matplotlib.rc_context(RC):
        fig = Figure(figsize=(WIDTH, 4.6 + 0.3 * len(order)), layout="constrained")
        upper, lower = fig.subplots(2, 1, height_ratios=[0.5 + 0.3 * len(order), 3])
        grid = np.array([table[table["spec"] == spec]["mean"] for spec in order])
        image = upper.imshow(
            grid, aspect="auto", interpolation="nearest", cmap="viridis", norm=LogNorm(1, grid.max())
        )
        upper.set_yticks(range(len(order)), [short(spec) for spec in order], fontsize=FONT - 2)
        layers = range(0, grid.shape[1] // per_layer, 5)
        upper.set_xticks([layer * per_layer for layer in layers], [f"L{layer}" for layer in layers])
        upper.set_xlabel(f"KV head ({per_layer} per layer), in the order of the layers", fontsize=FONT - 1)
        bar = fig.colorbar(image, ax=upper)
        bar.set_label("eviction cost", fontsize=FONT - 1)
        bar.formatter = FuncFormatter(lambda value, _: f"{value:g}")
        bar.ax.yaxis.set_minor_formatter(NullFormatter())
        for spec, row in zip(order, grid, strict=True):
            look = looks[spec]
            lower.plot(
                np.arange(1, len(row) + 1), np.sort(row), look.line, color=look.color, linewidth=look.width,
                marker=look.marker, markersize=5, markevery=15, label=f"{short(spec)} ({row.mean():.3g})",
            )  # fmt: skip
        lower.set_yscale("log")
        name_ticks(lower, 1)
        lower.set_xlabel("KV heads, each policy's own sorted by cost", fontsize=FONT - 1)
        lower.set_ylabel("eviction cost\n(lower is better)", fontsize=FONT - 1)
        lower.grid(axis="y", **GRID)
        n = f"{found[0].folder}, n = {len(found[0].samples)} traces, mean"
        heading(fig, [f"{found[0].title}; {n}"])
        fig.legend(
            *lower.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False,
            fontsize=FONT - 2, title="policy (mean over heads)", title_fontsize=FONT - 2,
        )  # fmt: skip
    return save(fig, asked.out, "head-costs", short_numbers(table.drop(columns="spec")), compact=True)


def _by_head(costs: Costs) -> pd.DataFrame:
    """Mean eviction cost of every head, with its interval over traces."""
    lines: list[dict[str, Any]] = []
    items = []
    for spec, stacked in costs.totals.items():
        for layer, head in np.ndindex(*stacked.shape[1:]):
            items.append(measured(costs.samples, stacked[:, layer, head]))
            place = {"layer": layer, "head": head, "name": head_name(layer, head)}
            numbers = {"mean": items[-1].estimate, "n": len(costs.samples)}
            lines.append({"traces": costs.folder, "policy": short(spec), "spec": spec, **place, **numbers})
    return _with_bounds(lines, items)
