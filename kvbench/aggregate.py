"""From rows to numbers with uncertainty: one line per (configuration, metric).

Rows are grouped by everything except the sample, so different configurations never mix.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from .bootstrap import Floats, Measured, intervals
from .config import FULL
from .errors import BadInput, UnknownName
from .metrics import METRICS, describe
from .panels import SETTING, SHARED, matches

HELPERS = {"nll_tokens"}  # weights, not results
LABELS = ("majority_rate", "label_share")
COLUMNS = [
    "task", "policy", "budget", "metric", "unit", "mean", "lo", "hi", "n", "model", "schedule", "chunk",
    "pins", "pins_mode", "question", "template", "seed", "kept", "context_tokens", "evicted_layers", "layers",
    "n_skipped", "n_failed", "reasons", "detail", "majority", "majority_label",
    "run", "config",
]  # fmt: skip


def available(rows: pd.DataFrame) -> list[str]:
    """Metrics that these rows have, in the order of the metric table, a task's own ones last."""
    measured = [name for name in rows.columns if name.startswith(("metric:", "time:"))]
    names = {name.split(":", 1)[1] for name in measured if rows[name].notna().any()} | {"kept"}
    if {"nll", "nll_tokens"} <= names:
        names.add("ppl")
    if rows["gold_label"].notna().any():
        names.update(LABELS)
    return [name for name in METRICS if name in names] + sorted(names - set(METRICS) - HELPERS)


def aggregate(rows: pd.DataFrame, metrics: Sequence[str] | None = None) -> pd.DataFrame:
    """Means over samples with 95% bootstrap intervals.

    metrics: which ones, None for all that the rows have. Returns COLUMNS, where task and policy are
    specs. budget and chunk are Int64 with NA (no budget: the full cache); n counts the samples
    behind the mean; kept and context_tokens are means; lo and hi are NaN for one sample. reasons:
    why rows were skipped or failed. detail: the label that majority_rate or label_share is about.
    majority: the majority rate of the cell's samples (NaN unless a choice task), beside every metric.
    A configuration without any usable row keeps one line per metric of its task, with n = 0.
    Raises: UnknownName for a metric that no row has.
    """
    names = list(metrics) if metrics is not None else available(rows)
    _check_names(names, available(rows))
    rows = _prepared(rows)
    of_task = {task: available(part) for task, part in rows.groupby("task", sort=False)}
    lines: list[dict[str, Any]] = []
    items: list[Measured] = []
    for _, cell in rows.groupby([*SETTING, "policy", "budget", "pins", "config"], sort=False, dropna=False):
        ok = cell[cell["status"] == "ok"]
        common = _common(cell, ok)
        for name in names:
            item, detail = _measure(ok, name)
            if item.samples or (ok.empty and name in of_task[common["task"]]):
                numbers = {"metric": name, "unit": describe(name).unit, "mean": item.estimate}
                lines.append({**common, **numbers, "n": len(item.samples), "detail": detail})
                items.append(item)
    for line, (low, high) in zip(lines, intervals(items), strict=True):
        line.update(lo=low, hi=high)
        if line["metric"] == "majority_rate":  # a property of these samples, not an estimate
            line.update(lo=math.nan, hi=math.nan)
    return _finished(lines, rows, names)


def _check_names(names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise UnknownName("metric", name, known, "These are the metrics in the results.")


def _prepared(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows by ascending sample id; `policy` and `task` become the full specs."""
    renamed = rows.assign(policy=rows["spec"], task=rows["task_spec"], run=rows.get("run", ""))
    return renamed.sort_values("sample", kind="stable")


def _common(cell: pd.DataFrame, ok: pd.DataFrame) -> dict[str, Any]:
    """What all metrics of a cell share."""
    first = cell.iloc[0]
    status = Counter(cell["status"])
    bad = cell[cell["status"] != "ok"]
    reasons = Counter(
        f"{state}: {reason or 'no reason given'}" for state, reason in bad[["status", "reason"]].values
    )
    line = {name: first[name] for name in [*SETTING, "policy", "budget", "pins", "run", "config"]}
    line |= {name: _mean(ok[name]) for name in ("kept", "context_tokens")}
    line |= {name: ok[name].min() if len(ok) else pd.NA for name in ("evicted_layers", "layers")}
    line |= {"n_skipped": status["skipped"], "n_failed": status["failed"]}
    gold, line["majority_label"] = _measure(ok, "majority_rate")
    line["majority"] = gold.estimate
    line["reasons"] = "; ".join(f"{text} ({count})" for text, count in sorted(reasons.items()))
    return line


def _mean(column: pd.Series) -> float:
    values = column.dropna().to_numpy(dtype=float)
    return math.fsum(values) / len(values) if len(values) else math.nan


def _measure(ok: pd.DataFrame, name: str) -> tuple[Measured, str]:
    """A cell's values of one metric, and the label it is about (or "")."""
    if name in LABELS:
        source = "gold_label" if name == "majority_rate" else "label"
        rows = ok[ok["gold_label"].notna() & ok[source].notna()]
        counts = Counter(rows[source])
        top = min(counts, key=lambda label: (-counts[label], label), default="")
        return Measured(tuple(rows["sample"]), np.array([float(label == top) for label in rows[source]])), top
    pooled = describe(name).combine == "ppl"
    values = _values(ok, "nll" if pooled else name)
    weights = _values(ok, "nll_tokens") if pooled else np.ones(len(ok))
    keep = ~np.isnan(values) & (weights > 0)
    samples = tuple(ok["sample"].to_numpy(dtype=object)[keep])
    if pooled:
        return Measured(samples, (values * weights)[keep], weights[keep], log=True), ""
    return Measured(samples, values[keep]), ""


def _values(ok: pd.DataFrame, name: str) -> Floats:
    column = _column(ok, name)
    return ok[column].to_numpy(dtype=float) if column in ok else np.full(len(ok), np.nan)


def _column(rows: pd.DataFrame, name: str) -> str:
    if name == "kept":
        return "kept"
    return f"time:{name}" if f"time:{name}" in rows else f"metric:{name}"


def _finished(lines: list[dict[str, Any]], rows: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """Types, and a stable order: tasks and policies as they first appear in the file, full first."""
    frame = pd.DataFrame(lines, columns=COLUMNS, dtype="object")
    real = ["mean", "lo", "hi", "kept", "context_tokens", "majority"]
    whole = ["budget", "chunk", "seed", "evicted_layers", "layers", "n", "n_skipped", "n_failed"]
    frame = frame.astype({**dict.fromkeys(real, "float64"), **dict.fromkeys(whole, "Int64")})
    inside = rows.sort_index()  # the file's order
    policies = list(dict.fromkeys([FULL, *inside["policy"]]))
    ranks = {"task": list(dict.fromkeys(inside["task"])), "policy": policies, "metric": list(names)}
    keys = frame.assign(**{name: frame[name].map(order.index) for name, order in ranks.items()})
    order = keys.sort_values(["task", *SETTING[1:], "metric", "policy", "budget"], kind="stable").index
    return frame.loc[order].reset_index(drop=True)


def paired(rows: pd.DataFrame, baseline: str, metric: str) -> pd.DataFrame:
    """Every policy minus the baseline, on the samples both have, per setting and budget.

    baseline: a spec; "full" is compared at every budget. metric: one measured per sample. Returns
    task, policy, baseline, budget, metric, mean (of policy - baseline), lo, hi, n, win, tie, loss
    (samples; a win is the better value), p (exact two-sided sign test on wins and losses), setting.
    Raises: UnknownName for a baseline or metric that no row has, BadInput when one of the two has
    several configurations at the same setting and budget.
    """
    _check_names([metric], [name for name in available(rows) if name not in (*LABELS, "ppl")])
    rows = _prepared(rows)
    specs = list(dict.fromkeys(rows.sort_index()["policy"]))
    if baseline not in specs:
        raise UnknownName(
            "policy", baseline, specs, "The baseline must be one of the policies in the results."
        )
    column = _column(rows, metric)
    usable = rows[(rows["status"] == "ok") & rows[column].notna()]
    lines: list[dict[str, Any]] = []
    items: list[Measured] = []
    base = usable[usable["policy"] == baseline]
    candidates = usable[~usable["policy"].isin([baseline, FULL])]
    for _, mine in candidates.groupby([*SETTING, "policy", "budget"], sort=False, dropna=False):
        setting = {name: mine[name].iloc[0] for name in [*SETTING, "policy", "budget"]}
        names = SHARED if baseline == FULL else [*SETTING, "budget"]
        theirs = base[matches(base, setting, names)]
        both = _on_same_samples(mine, theirs, column)
        if both.samples:
            numbers = {"metric": metric, "mean": both.estimate, "n": len(both.samples)}
            lines.append({**setting, "baseline": baseline, **numbers, **_signs(both, metric)})
            items.append(both)
    for line, (low, high) in zip(lines, intervals(items), strict=True):
        line.update(lo=low, hi=high)
    columns = [
        "task",
        "policy",
        "baseline",
        "budget",
        "metric",
        "mean",
        "lo",
        "hi",
        "n",
        "win",
        "tie",
        "loss",
        "p",
    ]
    frame = pd.DataFrame(lines, columns=[*columns, *SETTING[1:]]).astype(
        {"budget": "Int64", "chunk": "Int64"}
    )
    order = frame.assign(policy=frame["policy"].map(specs.index)).sort_values([*SETTING, "policy", "budget"])
    return frame.loc[order.index].reset_index(drop=True)


def _on_same_samples(mine: pd.DataFrame, theirs: pd.DataFrame, column: str) -> Measured:
    """Per-sample differences."""
    for side in (mine, theirs):
        if side["sample"].duplicated().any() and side["policy"].iloc[0] != FULL:
            raise BadInput(
                f"{side['policy'].iloc[0]} has several configurations at one setting and budget: "
                "compare the run folders one by one"
            )
    other = theirs.drop_duplicates("sample").set_index("sample")[column]
    mine = mine[mine["sample"].isin(other.index)]
    difference = mine[column].to_numpy(dtype=float) - other.loc[mine["sample"]].to_numpy(dtype=float)
    return Measured(tuple(mine["sample"]), difference)


def _signs(both: Measured, metric: str) -> dict[str, Any]:
    """Wins, ties and losses, and the two-sided binomial probability of a split so uneven by chance."""
    better = -both.values if describe(metric).better == "lower" else both.values
    win, loss = int((better > 0).sum()), int((better < 0).sum())
    n = win + loss
    tail = sum(math.comb(n, k) for k in range(min(win, loss) + 1))
    return {"win": win, "tie": len(better) - n, "loss": loss, "p": min(1.0, 2 * tail / 2**n)}
