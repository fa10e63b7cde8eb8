"""The KVP paper's figures of recorded traces, and those of its training objectives."""

from __future__ import annotations

from kvbench.show.figures import TRACES, FigureKind

STUDY = "a folder of python -m kvbench.policies.kvp.study"

FIGURES = (
    FigureKind(
        "budget-cost", "6a, 20-22", "eviction cost and missed mass of every budget", TRACES,
        ("policy", "pins", "limit", "head"), "kvbench.policies.kvp.figures.costs:budget_cost",
    ),
    FigureKind(
        "head-costs", "21, 22", "eviction cost of every KV head under every policy", TRACES,
        ("policy", "pins", "limit"), "kvbench.policies.kvp.figures.costs:head_costs",
    ),
    FigureKind(
        "importance", "9a", "future attention by rank, of eight heads from sharp to flat", TRACES,
        ("sample",), "kvbench.policies.kvp.figures.importance:importance",
    ),
    FigureKind(
        "rank-error", "9b", "one head's tokens by oracle rank, coloured by rank error", TRACES,
        ("policy", "pins", "sample", "head"), "kvbench.policies.kvp.figures.importance:rank_errors",
    ),
    FigureKind(
        "rank-variance", "10", "mean and variance over heads of each position's rank", TRACES,
        ("policy", "pins", "sample"), "kvbench.policies.kvp.figures.rankings:rank_variance",
    ),
    FigureKind(
        "rank-matrix", "11", "every head's ranking, coloured by position", TRACES,
        ("policy", "pins", "sample"), "kvbench.policies.kvp.figures.rankings:rank_matrix",
    ),
    FigureKind(
        "head-correlation", "12", "rank correlation between heads", TRACES,
        ("policy", "pins", "sample"), "kvbench.policies.kvp.figures.rankings:head_correlation",
    ),
    FigureKind(
        "objectives", "6b", "training objectives of kvp: cost, missed mass, needles", STUDY,
        (), "kvbench.policies.kvp.figures.objectives:objectives",
    ),
    FigureKind(
        "objectives-by-budget", "6b", "training objectives of kvp: eviction cost of every budget",
        f"{STUDY}, then kvbench trace folders",
        ("pins", "limit", "head"), "kvbench.policies.kvp.figures.objectives:objectives_by_budget",
    ),
)  # fmt: skip
