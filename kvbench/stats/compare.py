"""Policies against a baseline on the same samples: differences, intervals, tests, and what to distrust."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd

from ..contract.cell import FULL
from ..contract.metrics import NONE, Metric, describe
from ..errors import BadInput, UnknownName
from ..store.frame import metrics_of
from .aggregate import LABELS, Cells, check_names, empty_answers, group_indices, list_metrics, prepare_rows
from .pairs import (
    COLUMNS,
    FLAGS,
    PairedValues,
    Values,
    are_answers,
    correct,
    match_samples,
    measure_pairs,
    order_lines,
    usable_rows,
    values_of,
)
from .panels import LINE_NAMES, ROW_SETTING, SETTING, SHARED, main_metric, matches, short_names

CHOICE = ("accuracy", "acc_norm")  # what a majority rate can be compared with


def compare(rows: pd.DataFrame, baseline: str = FULL, metrics: Sequence[str] | None = None,
            tasks: Mapping[str, Mapping[str, Any]] | None = None) -> pd.DataFrame:  # fmt: skip
    """Every policy against the baseline, per task, setting, metric and budget.

    rows: as `read_rows` gives them. baseline: a spec, or what tables show of it; "full" is compared at every
    budget. metrics: None takes each task's main one, and kl where the baseline has it; see `per_sample`.
    tasks: the manifest's section, for the main metrics. Returns `compare_pairs` of each metric with
    beats_full (a better mean than the full cache's by more than the interval of the difference), majority,
    majority_label, below_majority (of the mean), and n_empty (samples where the policy's answer is empty).
    Raises: as `compare_pairs`; BadInput when there is nothing to compare.
    """
    parts, stored = [], metrics_of(rows)
    baseline = _as_in_rows(rows, baseline)
    for task, own in rows.groupby("task_spec", sort=False):
        if baseline not in set(own["spec"]):
            continue
        there = list_metrics(own[own["spec"] == baseline])
        lines = pd.DataFrame({"metric": list_metrics(own)})
        asked = metrics or [main_metric(lines, str(task), tasks), "kl"]
        asked = [per_sample(name, stored) for name in asked]
        parts += [compare_pairs(own, baseline, name) for name in dict.fromkeys(asked) if name in there]
    if metrics is not None:
        check_names(metrics, [name for name in list_metrics(rows) if name not in LABELS])
    if not parts:
        _check_baseline(rows, baseline)
    frame = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=[*COLUMNS])
    if frame.empty:
        raise BadInput(
            f"nothing to compare with {baseline}: no other policy has the same budgets, samples and metrics"
        )
    return add_flags(frame, rows)[[*COLUMNS, *SETTING[1:]]]


def per_sample(metric: str, stored: Mapping[str, Metric] = NONE) -> str:
    """What samples are compared by: perplexity is a number of a cell, and nll what a sample adds to it."""
    return "nll" if describe(metric, stored).combine == "ppl" else metric


def compare_pairs(rows: pd.DataFrame, baseline: str, metric: str) -> pd.DataFrame:
    """Every policy minus the baseline, on the samples both have, per setting and budget.

    metric: one measured per sample. A line has both means, their difference with its 95%
    interval, n (samples), win, tie and loss (samples; a win is the better value), the test with its
    two-sided p (McNemar's where the differences allow it), p_holm (see `correct`), p_sign (the sign test's,
    of wins and losses: one large difference cannot decide it), n_fit (samples in which nothing is evicted)
    and detectable (see kvbench.stats.significance).
    Raises: UnknownName for a baseline or metric that no row has, BadInput when one of the two has
    several configurations at the same setting and budget.
    """
    check_names([metric], [name for name in list_metrics(rows) if name not in (*LABELS, "ppl")])
    _check_baseline(rows, baseline)
    rows = prepare_rows(rows)
    usable = usable_rows(rows, metric)
    lines, pairs = [], []
    for setting, both in _pairs_with(usable, baseline):
        lines.append({**setting, "baseline": baseline})
        pairs.append(both)
    about = describe(metric, metrics_of(rows))
    lines = measure_pairs(lines, pairs, about, are_answers(usable, about))
    return order_lines(lines, rows)


def _pairs_with(usable: pd.DataFrame, baseline: str) -> Iterator[tuple[dict[str, Any], PairedValues]]:
    """(setting, values of both) of every policy and budget that shares samples with the baseline."""
    base = usable[usable["spec"] == baseline]
    candidates = usable[~usable["spec"].isin([baseline, FULL])]
    equal = ["task_spec", *SHARED] if baseline == FULL else [*ROW_SETTING, "budget"]
    theirs: dict[tuple[Any, ...], Values] = {}
    for members in group_indices(candidates, [*ROW_SETTING, "spec", "budget"]):
        mine = candidates.iloc[members]
        setting = {name: mine[name].iloc[0] for name in [*ROW_SETTING, "spec", "budget"]}
        key = tuple(None if pd.isna(setting[name]) else setting[name] for name in equal)
        if key not in theirs:
            theirs[key] = values_of(base[matches(base, setting, equal)])
        both = match_samples(values_of(mine), theirs[key])
        if len(both):
            yield {LINE_NAMES.get(name, name): value for name, value in setting.items()}, both


def compare_all(rows: pd.DataFrame, metric: str, brackets: Collection[str]) -> pd.DataFrame:
    """Every two curves of one panel on the samples both have, at each budget; the full cache at all of them.

    rows: of one panel (see `split_panels`), as `prepare_rows` gives them, each with the label of its line as
    `curve`; none twice per curve, budget, seed and sample. Lines are those of `compare_pairs`, with labels as
    policy and baseline; each pair is there once, the full cache as a baseline only. brackets: curves that
    bound the others: p_holm corrects for all pairs at a budget that have none.
    """
    usable = usable_rows(rows, metric)
    full = usable[usable["spec"] == FULL].assign(fits=True)
    lines: list[dict[str, Any]] = []
    pairs: list[PairedValues] = []
    for budget, cells in usable.groupby("budget", sort=True):
        labels = dict.fromkeys([*cells.sort_index()["curve"], *full["curve"]])
        both = pd.concat([cells, full])
        wide = both.pivot(index=["sample", "seed"], columns="curve", values="value")
        fits = both.pivot(index=["sample", "seed"], columns="curve", values="fits")
        samples, seeds = (wide.index.get_level_values(level).to_numpy(dtype=object) for level in (0, 1))
        curves = {label: wide[label].to_numpy(dtype=float) for label in labels}
        for one, other in combinations(labels, 2):
            here = ~np.isnan(curves[one] + curves[other])
            if here.any():
                lines.append({"budget": budget, "policy": one, "baseline": other})
                alike = fits[one][here].astype(bool) & fits[other][here].astype(bool)
                values = samples[here], seeds[here], curves[one][here], curves[other][here]
                pairs.append(PairedValues(*values, alike.to_numpy(dtype=bool)))
    names = [name for name in COLUMNS if name not in ("task", *FLAGS)]
    about = describe(metric, metrics_of(rows))
    frame = pd.DataFrame(measure_pairs(lines, pairs, about, are_answers(usable, about)), columns=names)
    frame.attrs = rows.attrs
    correct(frame, [], ~frame[["policy", "baseline"]].isin(list(brackets)).any(axis=1))
    return frame


def _as_in_rows(rows: pd.DataFrame, baseline: str) -> str:
    """The spec of a policy that was named as in rows, or as tables show it."""
    shown = short_names(rows["spec"].unique())
    found = [spec for spec, name in shown.items() if baseline in (spec, name)]
    return found[0] if len(found) == 1 else baseline


def _check_baseline(rows: pd.DataFrame, baseline: str) -> None:
    specs = list(dict.fromkeys(rows["spec"]))
    if baseline not in specs:
        hint = "The baseline must be one of the policies in the results."
        raise UnknownName("policy", baseline, specs, hint)


def add_flags(frame: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """Adds what makes a line suspect: better than the full cache, worse than always the same answer."""
    on = [*SETTING, "policy", "budget", "metric"]
    full = rows[rows["spec"] == FULL]
    of_full, stored = list_metrics(full) if len(full) else [], metrics_of(rows)
    names = [name for name in frame["metric"].unique() if name in of_full]
    ahead = [_ahead(_against_full(frame, rows, name), describe(name, stored))[on] for name in names]
    frame = frame.merge(_majority_rates(rows), on=on, how="left").merge(_seen_shares(rows), how="left")
    frame = frame.merge(_empty_counts(rows), on=on[:-1], how="left")
    found = frame[on].merge(pd.concat([frame[on].head(0), *ahead]).assign(hit=True), on=on, how="left")
    flagged = frame.assign(
        beats_full=found["hit"].fillna(False).astype(bool),
        below_majority=(frame["mean"] < frame["majority"]).fillna(False).astype(bool),
    )
    flagged.attrs = rows.attrs
    return flagged


def _seen_shares(rows: pd.DataFrame) -> pd.DataFrame:
    """By task, policy and budget, how much of the prompts its weights were trained on (see `SeenText`)."""
    names = ["task_spec", "spec", "budget"]
    found = rows.groupby(names, sort=False)["seen_share"].mean().reset_index()
    return found.rename(columns=LINE_NAMES)[[LINE_NAMES.get(name, name) for name in names] + ["seen_share"]]


def _against_full(frame: pd.DataFrame, rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The comparison with the full cache by a metric; that of the frame itself where it is one."""
    own = frame[frame["metric"] == metric]
    return own if set(own["baseline"]) == {FULL} else compare_pairs(rows, FULL, metric)


def _ahead(against: pd.DataFrame, metric: Metric) -> pd.DataFrame:
    """The lines of a comparison with the full cache that are better by more than their interval."""
    if metric.better == "lower":
        return against[against["hi"] < 0]
    return against[against["lo"] > 0] if metric.better == "higher" else against.head(0)


def _empty_counts(rows: pd.DataFrame) -> pd.DataFrame:
    """How many samples of every cell have an empty answer."""
    columns = ["task_spec", *SETTING[1:], "spec", "budget"]
    found = rows.assign(n_empty=rows["sample"].where(empty_answers(rows)))
    counts = found.groupby(columns, dropna=False, sort=False)["n_empty"].nunique().reset_index()
    return counts.rename(columns=LINE_NAMES)


def _majority_rates(rows: pd.DataFrame) -> pd.DataFrame:
    """The majority rate and its label of every cell that was scored by a metric of CHOICE."""
    cells = Cells(prepare_rows(rows))
    names = [name for name in CHOICE if name in list_metrics(rows)]
    lines = []
    for members in cells.members:
        ok = members[cells.ok[members]]
        rate, label = cells.estimate(ok, "majority_rate")
        line = {LINE_NAMES.get(n, n): cells.column(n)[members[0]] for n in (*ROW_SETTING, "spec", "budget")}
        scored = [name for name in names if cells.estimate(ok, name)[0].samples]
        lines += [{**line, "metric": n, "majority": rate.value, "majority_label": label} for n in scored]
    on = [*SETTING, "policy", "budget", "metric"]
    frame = pd.DataFrame(lines, columns=[*on, "majority", "majority_label"])
    types = {"budget": "Int64", "chunk": "Int64", "majority": "float64"}  # also where there is no line
    return frame.astype(types).drop_duplicates(on)
