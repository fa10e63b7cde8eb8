"""From rows to numbers with uncertainty: one line per (configuration, metric).

Rows are grouped by everything except the sample and the seed, so different configurations never mix.
Seeds of one configuration are pooled: a sample that appears under several seeds stays one sample.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from ..contract.cell import FULL
from ..contract.metrics import describe, in_order
from ..errors import UnknownName
from ..store.frame import metrics_of
from .bootstrap import Floats, Measured, intervals, measured
from .panels import SETTING, seeds_text

HELPERS = {"nll_tokens"}  # weights, not results
LABELS = ("majority_rate", "label_share")
COLUMNS = [
    "task", "policy", "budget", "metric", "unit", "mean", "lo", "hi", "n", "model", "schedule", "chunk",
    "pins", "pins_mode", "question", "template", "seeds", "kept", "context_tokens", "evicted_layers",
    "layers", "n_skipped", "n_failed", "reasons", "detail", "majority", "majority_label",
    "run", "config", "family",
]  # fmt: skip


def available(rows: pd.DataFrame) -> list[str]:
    """Metrics that these rows have, in the order of the metric table, a task's own ones last."""
    measured = [name for name in rows.columns if name.startswith(("metric:", "time:"))]
    names = {name.split(":", 1)[1] for name in measured if rows[name].notna().any()} | {"kept"}
    if {"nll", "nll_tokens"} <= names:
        names.add("ppl")
    if rows["gold_label"].notna().any():
        names.update(LABELS)
    return in_order(names - HELPERS, metrics_of(rows))


def aggregate(rows: pd.DataFrame, metrics: Sequence[str] | None = None) -> pd.DataFrame:
    """Means over samples with 95% bootstrap intervals.

    metrics: which ones, None for all that the rows have. Returns COLUMNS, where task and policy are
    specs. budget and chunk are Int64 with NA (no budget: the full cache). n counts the different
    samples behind the mean; seeds ("0,1,2") are pooled, and config is the first row's. kept and
    context_tokens are means; lo and hi are NaN for one sample. reasons: why rows were skipped or failed.
    detail: the label that majority_rate or label_share is about. majority: the majority rate of the
    cell's samples (NaN unless a choice task), beside every metric.
    A configuration without any usable row keeps one line per metric of its task, with n = 0.
    Raises: UnknownName for a metric that no row has.
    """
    names = list(metrics) if metrics is not None else available(rows)
    check_names(names, available(rows))
    rows, stored = prepared(rows), metrics_of(rows)
    of_task = {task: available(part) for task, part in rows.groupby("task", sort=False)}
    lines: list[dict[str, Any]] = []
    items: list[Measured] = []
    for _, cell in rows.groupby([*SETTING, "policy", "budget", "pins", "family"], sort=False, dropna=False):
        ok = cell[cell["status"] == "ok"]
        common = _common(cell, ok)
        for name in names:
            item, detail = _measure(ok, name)
            if item.samples or (ok.empty and name in of_task[common["task"]]):
                numbers = {"metric": name, "unit": describe(name, stored).unit, "mean": item.estimate}
                lines.append({**common, **numbers, "n": len(item.samples), "detail": detail})
                items.append(item)
    for line, (low, high) in zip(lines, intervals(items), strict=True):
        line.update(lo=low, hi=high)
        if line["metric"] == "majority_rate":  # a property of these samples, not an estimate
            line.update(lo=math.nan, hi=math.nan)
    return _finished(lines, rows, names)


def check_names(names: Sequence[str], known: Sequence[str]) -> None:
    """Raises: UnknownName for a metric that is not among the known ones."""
    for name in names:
        if name not in known:
            raise UnknownName("metric", name, known, "These are the metrics in the results.")


def prepared(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows by ascending sample id; `policy` and `task` become the full specs.

    family: what is pooled over seeds. Rows of before there were families, and rows that share family,
    seed and sample (of two data files), fall back to their configuration, which has one seed.
    """
    family = rows["family"].where(rows["family"].notna(), rows["config"])
    once = ["family", "pins_mode", "seed", "sample"]
    twice = rows.assign(family=family).duplicated(once, keep=False)
    family = family.where(~family.isin(set(family[twice])), rows["config"])
    renamed = rows.assign(policy=rows["spec"], task=rows["task_spec"], run=rows.get("run", ""), family=family)
    return renamed.sort_values("sample", kind="stable")


def _common(cell: pd.DataFrame, ok: pd.DataFrame) -> dict[str, Any]:
    """What all metrics of a cell share."""
    first = cell.iloc[0]
    status = Counter(cell["status"])
    bad = cell[cell["status"] != "ok"]
    reasons = Counter(
        f"{state}: {reason or 'no reason given'}" for state, reason in bad[["status", "reason"]].values
    )
    line = {name: first[name] for name in [*SETTING, "policy", "budget", "pins", "run", "config", "family"]}
    line["seeds"] = seeds_text(cell["seed"].dropna())
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
        return measured(rows["sample"], np.array([float(label == top) for label in rows[source]])), top
    pooled = describe(name, metrics_of(ok)).combine == "ppl"
    values = _values(ok, "nll" if pooled else name)
    weights = _values(ok, "nll_tokens") if pooled else np.ones(len(ok))
    keep = ~np.isnan(values) & (weights > 0)
    samples = ok["sample"].to_numpy(dtype=object)[keep]
    if pooled:
        return measured(samples, (values * weights)[keep], weights[keep], log=True), ""
    return measured(samples, values[keep]), ""


def _values(ok: pd.DataFrame, name: str) -> Floats:
    column = column_of(ok, name)
    return ok[column].to_numpy(dtype=float) if column in ok else np.full(len(ok), np.nan)


def column_of(rows: pd.DataFrame, name: str) -> str:
    """The column of the rows that holds a metric."""
    if name == "kept":
        return "kept"
    return f"time:{name}" if f"time:{name}" in rows else f"metric:{name}"


def _finished(lines: list[dict[str, Any]], rows: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """Types, and a stable order: tasks and policies as they first appear in the file, full first."""
    frame = pd.DataFrame(lines, columns=COLUMNS, dtype="object")
    real = ["mean", "lo", "hi", "kept", "context_tokens", "majority"]
    whole = ["budget", "chunk", "evicted_layers", "layers", "n", "n_skipped", "n_failed"]
    frame = frame.astype({**dict.fromkeys(real, "float64"), **dict.fromkeys(whole, "Int64")})
    inside = rows.sort_index()  # the file's order
    policies = list(dict.fromkeys([FULL, *inside["policy"]]))
    ranks = {"task": list(dict.fromkeys(inside["task"])), "policy": policies, "metric": list(names)}
    keys = frame.assign(**{name: frame[name].map(order.index) for name, order in ranks.items()})
    order = keys.sort_values(["task", *SETTING[1:], "metric", "policy", "budget"], kind="stable").index
    ready = frame.loc[order].reset_index(drop=True)
    ready.attrs = rows.attrs
    return ready
