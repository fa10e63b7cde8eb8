"""What rankings of recorded tokens cost: by budget, by KV head, with intervals over traces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from kvbench.contract.look import style_of
from kvbench.contract.registry import spec_of
from kvbench.errors import BadInput
from kvbench.learn import progress
from kvbench.learn.ranked import RecordedRanker, boundary
from kvbench.learn.trace import TraceSet
from kvbench.show.kit import (
    TRACES,
    Estimate,
    Floats,
    Request,
    Style,
    assign_styles,
    bootstrap_intervals,
    inputs,
    pool_rows,
    shorten,
)

from .heads import budget_costs, find_head, head_name, missed_masses

HINT = "make one with kvbench trace --task ... --samples 16 --out FOLDER"
POINTS_PER_OCTAVE = 4  # of budgets that are averaged into one point


@dataclass(frozen=True)
class Costs:
    """The costs of one folder of traces. folder: its name. samples: ids of the traces, ascending.

    budget: {spec: per trace -R^b, averaged over the budgets of a point, (layer, kv_head, point)}; longer
    traces have more points. missed: the same of the missed mass. totals: {spec: eviction cost (trace, layer,
    kv_head)}. names: {spec: for display}. upper: the policy that no other can beat, if it is there.
    """

    folder: str
    title: str
    samples: list[str]
    names: dict[str, str]
    upper: str | None
    budget: dict[str, list[Floats]] = field(default_factory=dict)
    missed: dict[str, list[Floats]] = field(default_factory=dict)
    totals: dict[str, Floats] = field(default_factory=dict)


def rank_folders(asked: Request, name: str, specs: Sequence[str]) -> tuple[list[Costs], dict[str, Style]]:
    """Rank the traces of all given folders; and how the policies are drawn.

    name: of the figure. Raises: KvbenchError for what cannot be ranked.
    """
    found = []
    looks: dict[str, Style] = {}
    for path in inputs(asked, name, TRACES, [], HINT):
        traces = TraceSet(path)
        ranker = RecordedRanker.open(traces, specs, asked.pins or "none")
        looks = assign_styles(ranker.specs, style_of(ranker.policies))
        found.append(_costs(ranker, asked))
    return found, looks


def _costs(ranker: RecordedRanker, asked: Request) -> Costs:
    traces = ranker.traces
    chosen = sorted(list(traces)[: asked.limit], key=lambda trace: trace.info.id)
    if not chosen:
        raise BadInput(f"{traces.folder} holds no trace yet: record some with kvbench trace")
    costs = Costs(
        folder=traces.folder.name,
        title=f"{traces.header['model']}, future from the question on, pins {ranker.pins}",
        samples=[trace.info.id for trace in chosen],
        names={spec: shorten(spec) for spec in ranker.specs},
        upper=next((spec_of(policy) for policy in ranker.policies if policy.bracket == "upper"), None),
    )
    totals: dict[str, list[Floats]] = {}
    with progress(True, len(chosen), "traces") as advance:
        for trace in chosen:
            (one,) = ranker.rank(trace, boundary(trace))
            for spec, order in one.orders.items():
                every = budget_costs(order, one.utility)
                costs.budget.setdefault(spec, []).append(average_points(every.numpy()))
                missed = missed_masses(order, one.utility).numpy()
                costs.missed.setdefault(spec, []).append(average_points(missed))
                totals.setdefault(spec, []).append(every.sum(-1).numpy())
            advance(trace.info.task)
    costs.totals.update({spec: np.stack(each) for spec, each in totals.items()})
    return costs


def budget_edges(longest: int) -> list[int]:
    """The first budget of every point, and the one after the last: whole numbers near 2^(k/4), so that
    neighbouring points are about equally far apart on a logarithmic axis."""
    powers = np.arange(int(np.log2(longest + 1) * POINTS_PER_OCTAVE) + 1) / POINTS_PER_OCTAVE
    return [int(edge) for edge in np.unique(np.round(2.0**powers).astype(int))]


def average_points(costs: Floats) -> Floats:
    """Means over the budgets of each point that all belong to it. (..., n) -> (..., point)."""
    edges = budget_edges(costs.shape[-1])
    sums = np.add.reduceat(costs[..., : edges[-1] - 1], np.array(edges[:-1]) - 1, axis=-1)
    return np.asarray(sums / np.diff(edges))


def by_budget(costs: Costs, head: str | None, wanted: Sequence[str]) -> pd.DataFrame:
    """Means over heads (or of one head) per budget, with intervals over traces.

    wanted: budget_cost (-R^b), missed_mass, over_oracle: the missed mass over the upper bracket's, if that
    was ranked, too. Points that less than half of the traces are long enough for are left out.
    """
    budget, missed = (
        {spec: [_of_head(part, head) for part in parts] for spec, parts in values.items()}
        for values in (costs.budget, costs.missed)
    )
    least = missed[costs.upper] if costs.upper else None
    lines: list[dict[str, Any]] = []
    items: list[Estimate] = []
    for spec in budget:
        total = float(np.mean([_of_head(part[..., None], head) for part in costs.totals[spec]]))
        line = {"traces": costs.folder, "policy": costs.names[spec], "spec": spec, "eviction_cost": total}
        quantities: dict[str, tuple[list[Floats], list[Floats] | None]] = {
            "budget_cost": (budget[spec], None),
            "missed_mass": (missed[spec], None),
            **({"over_oracle": (missed[spec], least)} if least else {}),
        }
        for quantity in wanted:
            values, weights = quantities[quantity]
            for span, item in _points(costs.samples, values, weights):
                numbers = {"mean": item.value, "n": len(item.samples)}
                lines.append({**line, "quantity": quantity, **span, **numbers})
                items.append(item)
    return _with_bounds(lines, items)


def _of_head(part: Floats, head: str | None) -> Floats:
    """(layer, kv_head, point) -> (point,): of one head, or the mean over all."""
    return part[find_head(head, part.shape[:2])] if head else part.mean((0, 1))


def _points(
    samples: Sequence[str], values: Sequence[Floats], weights: Sequence[Floats] | None
) -> list[tuple[dict[str, float], Estimate]]:
    """Every point with its budgets. values, weights: per trace (point,)."""
    found = []
    longest = max(len(part) for part in values)
    for point, (low, high) in enumerate(pairwise(budget_edges(2**20)[: longest + 1])):
        long = [i for i, part in enumerate(values) if len(part) > point]
        if 2 * len(long) < len(values):
            break
        under = np.array([weights[i][point] for i in long]) if weights else None
        item = pool_rows([samples[i] for i in long], np.array([values[i][point] for i in long]), under)
        found.append(({"budget": (low + high - 1) / 2, "first_budget": low, "last_budget": high - 1}, item))
    return found


def by_head(costs: Costs) -> pd.DataFrame:
    """Mean eviction cost of every head, with its interval over traces."""
    lines: list[dict[str, Any]] = []
    items = []
    for spec, stacked in costs.totals.items():
        for layer, head in np.ndindex(*stacked.shape[1:]):
            items.append(pool_rows(costs.samples, stacked[:, layer, head]))
            names = {"traces": costs.folder, "policy": costs.names[spec], "spec": spec}
            place = {"layer": layer, "head": head, "name": head_name(layer, head)}
            lines.append({**names, **place, "mean": items[-1].value, "n": len(costs.samples)})
    return _with_bounds(lines, items)


def _with_bounds(lines: list[dict[str, Any]], items: list[Estimate]) -> pd.DataFrame:
    bounds = bootstrap_intervals(items)
    return pd.DataFrame(lines).assign(lo=[low for low, _ in bounds], hi=[high for _, high in bounds])
