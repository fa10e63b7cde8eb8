"""Policies against a baseline on the same samples: differences, intervals, tests, and what to distrust.

Rows are paired by seed and sample. Seeds of one sample are averaged before anything is tested, so that
asking one question three times is not three questions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..contract.cell import FULL
from ..contract.metrics import NONE, Metric, describe
from ..errors import BadInput, UnknownName
from ..store.frame import metrics_of
from .aggregate import LABELS, aggregate, available, check_names, column_of, prepared
from .bootstrap import Floats, Measured, intervals, measured
from .panels import SETTING, SHARED, main_metric, matches, seeds_text
from .significance import detectable, holm, paired_test

CHOICE = ("accuracy", "acc_norm")  # what a majority rate can be compared with
FLAGS = ("beats_full", "below_majority", "majority", "majority_label")
COLUMNS = [
    "task", "policy", "baseline", "budget", "metric", "unit", "mean", "baseline_mean", "difference", "lo",
    "hi", "n", "win", "tie", "loss", "test", "p", "p_holm", "detectable", "beats_full", "below_majority",
    "majority", "majority_label", "seeds",
]  # fmt: skip


def compare(rows: pd.DataFrame, baseline: str = FULL, metrics: Sequence[str] | None = None,
            tasks: Mapping[str, Mapping[str, Any]] | None = None) -> pd.DataFrame:  # fmt: skip
    """Every policy against the baseline, per task, setting, metric and budget.

    rows: as `read_rows` gives them. baseline: a spec; "full" is compared at every budget. metrics: None
    takes each task's main one (see `per_sample`), and kl where the baseline has it. tasks: the manifest's
    section, for the main metrics. Returns `paired` of each metric with beats_full (a better mean than the
    full cache's by more than the interval of the difference), majority, majority_label and below_majority
    (of the mean).
    Raises: as `paired`; BadInput when there is nothing to compare.
    """
    parts, stored = [], metrics_of(rows)
    for task, own in rows.groupby("task_spec", sort=False):
        if baseline not in set(own["spec"]):
            continue
        there = _of_baseline(own, baseline)
        lines = pd.DataFrame({"metric": available(own)})
        asked = metrics or [per_sample(main_metric(lines, str(task), tasks), stored), "kl"]
        parts += [paired(own, baseline, name) for name in dict.fromkeys(asked) if name in there]
    if metrics is not None:
        check_names(metrics, [name for name in available(rows) if name not in (*LABELS, "ppl")])
    if not parts:
        _check_baseline(rows, baseline)
    frame = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=[*COLUMNS])
    if frame.empty:
        raise BadInput(
            f"nothing to compare with {baseline}: no other policy has the same budgets, samples and metrics"
        )
    return with_flags(frame, rows)[[*COLUMNS, *SETTING[1:]]]


def per_sample(metric: str, stored: Mapping[str, Metric] = NONE) -> str:
    """What samples are compared by: perplexity is a number of a cell, and nll what a sample adds to it."""
    return "nll" if describe(metric, stored).combine == "ppl" else metric


def paired(rows: pd.DataFrame, baseline: str, metric: str) -> pd.DataFrame:
    """Every policy minus the baseline, on the samples both have, per setting and budget.

    metric: one measured per sample. A line has both means, their difference with its 95% bootstrap
    interval, n (samples), win, tie and loss (samples; a win is the better value), the test with its
    two-sided p (McNemar's where the differences allow it), p_holm (corrected for all lines of this
    setting) and detectable (see kvbench.significance).
    Raises: UnknownName for a baseline or metric that no row has, BadInput when one of the two has
    several configurations at the same setting and budget.
    """
    check_names([metric], [name for name in available(rows) if name not in (*LABELS, "ppl")])
    _check_baseline(rows, baseline)
    rows, about = prepared(rows), describe(metric, metrics_of(rows))
    column = column_of(rows, metric)
    usable = rows[(rows["status"] == "ok") & rows[column].notna()]
    binary = is_binary(usable[column])
    base = usable[usable["policy"] == baseline]
    candidates = usable[~usable["policy"].isin([baseline, FULL])]
    lines: list[dict[str, Any]] = []
    items: list[Measured] = []
    for _, mine in candidates.groupby([*SETTING, "policy", "budget"], sort=False, dropna=False):
        setting = {name: mine[name].iloc[0] for name in [*SETTING, "policy", "budget"]}
        theirs = base[matches(base, setting, SHARED if baseline == FULL else [*SETTING, "budget"])]
        both = on_same_samples(mine, theirs, column)
        if len(both):
            line, item = line_of(both, about, binary)
            lines.append({**setting, "baseline": baseline, **line})
            items.append(item)
    for line, (low, high) in zip(lines, intervals(items), strict=True):
        line.update(lo=low, hi=high)
    return finished(lines, rows)


def is_binary(values: pd.Series) -> bool:
    """Are these yes/no answers?"""
    return bool(np.isin(values.to_numpy(dtype=float), (0.0, 1.0)).all())


def every_pair(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Every two curves of one panel on the samples both have, at each budget; the full cache at all of them.

    rows: of one panel (see `panels`), as `prepared` gives them, each with the label of its line as
    `curve`; none twice per curve, budget, seed and sample. Lines are those of `paired`, with labels as
    policy and baseline; each pair is there once, the full cache as a baseline only. p_holm corrects for
    all pairs at a budget.
    """
    column, about = column_of(rows, metric), describe(metric, metrics_of(rows))
    usable = rows[(rows["status"] == "ok") & rows[column].notna()]
    binary = is_binary(usable[column])
    full = usable[usable["policy"] == FULL]
    lines: list[dict[str, Any]] = []
    items: list[Measured] = []
    for budget, cells in usable.groupby("budget", sort=True):
        labels = dict.fromkeys([*cells.sort_index()["curve"], *full["curve"]])
        wide = pd.concat([cells, full]).pivot(index=["sample", "seed"], columns="curve", values=column)
        samples, seeds = (wide.index.get_level_values(level).to_numpy(dtype=object) for level in (0, 1))
        curves = {label: wide[label].to_numpy(dtype=float) for label in labels}
        for one, other in combinations(labels, 2):
            here = ~np.isnan(curves[one] + curves[other])
            if here.any():
                both = Both(samples[here], seeds[here], curves[one][here], curves[other][here])
                line, item = line_of(both, about, binary)
                lines.append({"budget": budget, "policy": one, "baseline": other, **line})
                items.append(item)
    for line, (low, high) in zip(lines, intervals(items), strict=True):
        line.update(lo=low, hi=high)
    frame = pd.DataFrame(lines, columns=[name for name in COLUMNS if name not in ("task", *FLAGS)])
    frame.attrs = rows.attrs
    for _, part in frame.groupby("budget"):
        frame.loc[part.index, "p_holm"] = holm(part["p"].tolist())
    return frame


def _check_baseline(rows: pd.DataFrame, baseline: str) -> None:
    specs = list(dict.fromkeys(rows["spec"]))
    if baseline not in specs:
        hint = "The baseline must be one of the policies in the results."
        raise UnknownName("policy", baseline, specs, hint)


def _of_baseline(rows: pd.DataFrame, baseline: str) -> list[str]:
    return available(rows[rows["spec"] == baseline])


@dataclass(frozen=True)
class Both:
    """Values of two policies on the (sample, seed) pairs that both have, by ascending sample, each (n,)."""

    samples: NDArray[np.object_]
    seeds: NDArray[np.object_]
    mine: Floats
    theirs: Floats

    def __len__(self) -> int:
        return len(self.samples)


def on_same_samples(mine: pd.DataFrame, theirs: pd.DataFrame, column: str) -> Both:
    keys = ["seed", "sample"]
    for side in (mine, theirs):
        if side.duplicated(keys).any() and side["policy"].iloc[0] != FULL:
            raise BadInput(
                f"{side['policy'].iloc[0]} has several configurations at one setting and budget: "
                "compare the run folders one by one"
            )
    other = theirs.drop_duplicates(keys)[[*keys, column]].rename(columns={column: "theirs"})
    both = mine[[*keys, column]].rename(columns={column: "mine"}).merge(other, on=keys)
    samples, seeds = (both[name].to_numpy(dtype=object) for name in ("sample", "seed"))
    return Both(samples, seeds, *(both[name].to_numpy(dtype=float) for name in ("mine", "theirs")))


def line_of(both: Both, metric: Metric, binary: bool) -> tuple[dict[str, Any], Measured]:
    """The numbers of one comparison, and its difference for the bootstrap. binary: values are 0 or 1."""
    item = measured(both.samples, both.mine - both.theirs)
    differences: Floats = item.values if item.weights is None else item.values / item.weights
    better = -differences if metric.better == "lower" else differences
    win, loss = int((better > 0).sum()), int((better < 0).sum())
    binary = binary and item.weights is None  # means over seeds are no yes/no answers
    test = paired_test(differences, binary)
    line = {"metric": metric.name, "unit": metric.unit, "mean": both.mine.mean()}
    line |= {"baseline_mean": both.theirs.mean(), "difference": item.estimate, "n": len(differences)}
    line |= {"win": win, "tie": len(differences) - win - loss, "loss": loss, "test": test.name, "p": test.p}
    return line | {
        "detectable": detectable(differences, binary),
        "seeds": seeds_text(seed for seed in both.seeds if not pd.isna(seed)),
    }, item


def finished(lines: list[dict[str, Any]], rows: pd.DataFrame) -> pd.DataFrame:
    """Types, Holm's correction within each setting, and an order: budgets ascending, then policies.

    rows: those behind the lines, `prepared`.
    """
    specs = list(dict.fromkeys(rows.sort_index()["policy"]))
    names = [name for name in COLUMNS if name not in FLAGS]
    frame = pd.DataFrame(lines, columns=[*names, *SETTING[1:]])
    frame = frame.astype({"budget": "Int64", "chunk": "Int64"})
    for _, part in frame.groupby(SETTING, sort=False, dropna=False):
        frame.loc[part.index, "p_holm"] = holm(part["p"].tolist())
    order = frame.assign(policy=frame["policy"].map(specs.index)).sort_values([*SETTING, "budget", "policy"])
    ready = frame.loc[order.index].reset_index(drop=True)
    ready.attrs = rows.attrs
    return ready


def with_flags(frame: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """Adds what makes a line suspect: better than the full cache, worse than always the same answer."""
    on = [*SETTING, "policy", "budget", "metric"]
    full = rows[rows["spec"] == FULL]
    of_full = available(full) if len(full) else []
    ahead = [
        _ahead(paired(rows, FULL, name), describe(name, metrics_of(rows)))[on]
        for name in frame["metric"].unique()
        if name in of_full
    ]
    choice = [name for name in CHOICE if name in available(rows)]
    rates = aggregate(rows, choice)[[*on, "majority", "majority_label"]].drop_duplicates(on)
    frame = frame.merge(rates, on=on, how="left")
    found = frame[on].merge(pd.concat([frame[on].head(0), *ahead]).assign(hit=True), on=on, how="left")
    flagged = frame.assign(
        beats_full=found["hit"].fillna(False).astype(bool),
        below_majority=(frame["mean"] < frame["majority"]).fillna(False).astype(bool),
    )
    flagged.attrs = rows.attrs
    return flagged


def _ahead(against: pd.DataFrame, metric: Metric) -> pd.DataFrame:
    """The lines of a comparison with the full cache that are better by more than their interval."""
    if metric.better == "lower":
        return against[against["hi"] < 0]
    return against[against["lo"] > 0] if metric.better == "higher" else against.head(0)
