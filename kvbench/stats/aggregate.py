"""From rows to numbers with uncertainty: one line per (configuration, metric).

Rows are grouped by everything except the sample and the seed, so different configurations never mix.
Seeds of one configuration are pooled: a sample that appears under several seeds stays one sample.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..contract.cell import FULL
from ..contract.metrics import describe, in_order
from ..errors import UnknownName
from ..store.frame import metrics_of
from .bootstrap import Estimate, Floats, Kind, pool_rows
from .intervals import intervals
from .panels import LINE_NAMES, ROW_SETTING, SETTING, join_seeds

HELPERS = {"nll_tokens"}  # weights, not results
LABELS = ("majority_rate", "label_share")
CELL = (*ROW_SETTING, "spec", "budget", "pins", "family")  # rows that agree in these make one line
COLUMNS = [
    "task", "policy", "budget", "metric", "unit", "mean", "lo", "hi", "n", "model", "schedule", "chunk",
    "pins", "pins_mode", "question", "template", "seeds", "kept", "context_tokens", "n_fit", "n_empty",
    "seen_share",
    "evicted_layers", "layers", "n_skipped", "n_failed", "reasons", "detail", "majority", "majority_label",
    "run", "config", "family",
]  # fmt: skip

FORCED = "weights_for"  # one more column, where learned weights were forced onto another model

Indices = NDArray[np.intp]


def list_metrics(rows: pd.DataFrame) -> list[str]:
    """Metrics that these rows have, in the order of the metric table, a task's own ones last."""
    measured = [name for name in rows.columns if name.startswith(("metric:", "time:"))]
    names = {name.split(":", 1)[1] for name in measured if rows[name].notna().any()} | {"kept"}
    if {"nll", "nll_tokens"} <= names:
        names.add("ppl")
    if rows["gold_label"].notna().any():
        names.update(LABELS)
    return in_order(names - HELPERS, metrics_of(rows))


def aggregate(rows: pd.DataFrame, metrics: Sequence[str] | None = None) -> pd.DataFrame:
    """Means over samples with 95% intervals (see `intervals`).

    metrics: which ones, None for all that the rows have. Returns COLUMNS; a line names its policy and
    its task by their specs (LINE_NAMES says which columns of rows these are). budget and chunk are Int64
    with NA (no budget: the full cache). n counts the different
    samples behind the mean; seeds ("0,1,2") are pooled, and config is the first row's. kept,
    context_tokens and seen_share are means; lo and hi are NaN for one sample. n_fit: samples whose whole
    context fits the budget, so that nothing is evicted. n_empty: samples with an empty
    answer. reasons: why rows were skipped or failed.
    detail: the label that majority_rate or label_share is about. majority: the majority rate of the
    cell's samples (NaN unless a choice task), beside every metric.
    A configuration without any usable row keeps one line per metric of its task, with n = 0.
    Raises: UnknownName for a metric that no row has.
    """
    names = list(metrics) if metrics is not None else list_metrics(rows)
    check_names(names, list_metrics(rows))
    cells = Cells(prepare_rows(rows))
    stored = metrics_of(rows)
    lines: list[dict[str, Any]] = []
    items: list[Estimate] = []
    for members in cells.members:
        ok = members[cells.ok[members]]
        common = cells.summarize(members, ok)
        for name in names:
            item, detail = cells.estimate(ok, name)
            if item.samples or (not len(ok) and name in cells.task_metrics(common["task"])):
                numbers = {"metric": name, "unit": describe(name, stored).unit, "mean": item.value}
                lines.append({**common, **numbers, "n": len(item.samples), "detail": detail})
                items.append(item)
    for line, (low, high) in zip(lines, intervals(items), strict=True):
        line.update(lo=low, hi=high)
        if line["metric"] == "majority_rate":  # a property of these samples, not an estimate
            line.update(lo=math.nan, hi=math.nan)
    return _order_lines(lines, cells.rows, names)


def check_names(names: Sequence[str], known: Sequence[str]) -> None:
    """Raises: UnknownName for a metric that is not among the known ones."""
    for name in names:
        if name not in known:
            raise UnknownName("metric", name, known, "These are the metrics in the results.")


def prepare_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows by ascending sample id, each with the family that it is pooled in over seeds.

    Rows of before there were families, and rows that share family, seed and sample (of two data
    files), fall back to their configuration, which has one seed.
    """
    family = rows["family"].where(rows["family"].notna(), rows["config"])
    once = ["family", "pins_mode", "seed", "sample"]
    twice = rows.assign(family=family).duplicated(once, keep=False)
    family = family.where(~family.isin(set(family[twice])), rows["config"])
    return rows.assign(run=rows.get("run", ""), family=family).sort_values("sample", kind="stable")


def column_of(rows: pd.DataFrame, name: str) -> str:
    """The column of the rows that holds a metric."""
    if name == "kept":
        return "kept"
    return f"time:{name}" if f"time:{name}" in rows else f"metric:{name}"


def group_indices(rows: pd.DataFrame, names: Sequence[str]) -> list[Indices]:
    """Positions of the rows that agree in these columns, a missing value being one of its own; groups and
    the positions in them in the order of the rows."""
    codes = rows.groupby(list(names), sort=False, dropna=False).ngroup().to_numpy()
    order = np.argsort(codes, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(codes[order])) + 1) if len(order) else []


def nothing_evicted(rows: pd.DataFrame) -> NDArray[np.bool_]:
    """(row,): whether the whole context fits the row's budget, so that the policy decides nothing."""
    kept, read, budget = (
        rows[name].to_numpy(dtype=float, na_value=np.nan) for name in ("kept", "context_tokens", "budget")
    )
    return np.asarray((budget >= read) & (kept >= read))


def empty_answers(rows: pd.DataFrame) -> NDArray[np.bool_]:
    """(row,): whether the model was to write an answer and wrote none. Two empty answers agree.

    A sample is to be answered in writing where `agreement` is known and there is no choice.
    """
    written = rows["label"].isna().to_numpy(dtype=bool) & (rows["status"] == "ok").to_numpy(dtype=bool)
    blank = np.array([not text.strip() for text in rows["text"]], dtype=bool)
    if "metric:agreement" not in rows or not (written & blank).any():
        return np.zeros(len(rows), dtype=bool)
    names = list(zip(rows["task_spec"], rows["sample"], strict=True))
    known = rows["metric:agreement"].notna().to_numpy()
    asked = {name for name, one in zip(names, written & known, strict=True) if one}
    return written & blank & np.array([name in asked for name in names], dtype=bool)


class Cells:
    """Rows (see `prepare_rows`) in groups that become lines. Columns are arrays: a frame is slow to slice.

    members: the positions of each cell's rows. ok: (row,) bool. fits: (row,) bool, nothing was evicted.
    """

    def __init__(self, rows: pd.DataFrame) -> None:
        self.rows = rows
        self.members = group_indices(rows, CELL)
        self._stored = metrics_of(rows)
        self.ok = (rows["status"] == "ok").to_numpy(dtype=bool)
        self.fits = nothing_evicted(rows)
        self.empty = empty_answers(rows)
        self._columns: dict[str, NDArray[np.object_]] = {}
        self._numbers: dict[str, Floats] = {}
        self._kinds: dict[str, Kind] = {}
        self._forced = FORCED in rows and rows[FORCED].fillna("").ne("").any()

    def column(self, name: str) -> NDArray[np.object_]:
        if name not in self._columns:
            self._columns[name] = self.rows[name].to_numpy(dtype=object)
        return self._columns[name]

    def numbers(self, column: str) -> Floats:
        """A column of numbers: (row,), NaN where a row lacks it."""
        if column not in self._numbers:
            there = column in self.rows
            values = self.rows[column].to_numpy(dtype=float, na_value=np.nan) if there else [np.nan]
            self._numbers[column] = np.broadcast_to(values, len(self.rows))
        return self._numbers[column]

    def metric(self, name: str) -> Floats:
        return self.numbers(column_of(self.rows, name))

    @cached_property
    def _labelled(self) -> dict[str, NDArray[np.bool_]]:
        """By column of labels, (row,): where that label and the gold one are known."""
        gold = self.rows["gold_label"].notna()
        return {name: (gold & self.rows[name].notna()).to_numpy() for name in ("gold_label", "label")}

    @cached_property
    def _of_task(self) -> dict[str, list[str]]:
        return {str(task): list_metrics(part) for task, part in self.rows.groupby("task_spec", sort=False)}

    def task_metrics(self, task: str) -> list[str]:
        """What any row of a task has."""
        return self._of_task[task]

    def summarize(self, members: Indices, ok: Indices) -> dict[str, Any]:
        """What all lines of a cell share."""
        status = Counter(self.column("status")[members])
        bad = members[~self.ok[members]]
        reasons = Counter(
            f"{state}: {reason or 'no reason given'}"
            for state, reason in zip(self.column("status")[bad], self.column("reason")[bad], strict=True)
        )
        first = members[0]
        line = {LINE_NAMES.get(name, name): self.column(name)[first] for name in (*CELL, "run", "config")}
        line["seeds"] = join_seeds(map(int, _known(self.numbers("seed")[members])))
        for name in ("kept", "context_tokens", "seen_share"):
            values = _known(self.numbers(name)[ok])
            line[name] = math.fsum(values) / len(values) if len(values) else math.nan
        for name in ("evicted_layers", "layers"):
            line[name] = min(map(int, _known(self.numbers(name)[ok])), default=pd.NA)
        line["n_fit"] = (
            len(set(self.column("sample")[ok[self.fits[ok]]])) if line["budget"] is not pd.NA else 0
        )
        line["n_empty"] = len(set(self.column("sample")[members[self.empty[members]]]))
        line |= {"n_skipped": status["skipped"], "n_failed": status["failed"]}
        gold, line["majority_label"] = self.estimate(ok, "majority_rate")
        line["majority"] = gold.value
        if self._forced:
            line[FORCED] = self.column(FORCED)[first]
        line["reasons"] = "; ".join(f"{text} ({count})" for text, count in sorted(reasons.items()))
        return line

    def estimate(self, ok: Indices, name: str) -> tuple[Estimate, str]:
        """A metric of these rows, and the label it is about (or "")."""
        if name in LABELS:
            return self._label_share(ok, "gold_label" if name == "majority_rate" else "label")
        pooled = describe(name, self._stored).combine == "ppl"
        values = self.metric("nll" if pooled else name)[ok]
        weights = self.metric("nll_tokens")[ok] if pooled else np.ones(len(ok))
        keep = ~np.isnan(values) & (weights > 0)
        samples = self.column("sample")[ok[keep]]
        if pooled:
            return pool_rows(samples, (values * weights)[keep], weights[keep], log=True), ""
        return pool_rows(samples, values[keep], kind=self._kind(name)), ""

    def _kind(self, name: str) -> Kind:
        """Whether a metric counts answers in all of these rows."""
        if name not in self._kinds:
            values = self.metric(name)
            about = describe(name, self._stored)
            counted = about.counts_answers(np.unique(values[self.ok & ~np.isnan(values)]))
            self._kinds[name] = "rate" if counted else "mean"
        return self._kinds[name]

    def _label_share(self, ok: Indices, source: str) -> tuple[Estimate, str]:
        """How often the most frequent label of a column is there, and that label."""
        there = self._labelled[source][ok]
        labels = self.column(source)[ok[there]]
        counts = Counter(labels)
        top = min(counts, key=lambda label: (-counts[label], label), default="")
        values = np.array([float(label == top) for label in labels])
        return pool_rows(self.column("sample")[ok[there]], values, kind="rate"), top


def _known(values: Floats) -> Floats:
    return values[~np.isnan(values)]


def _order_lines(lines: list[dict[str, Any]], rows: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """Types, and a stable order: tasks and policies as they first appear in the file, full first."""
    forced = [FORCED] if any(FORCED in line for line in lines) else []
    frame = pd.DataFrame(lines, columns=[*COLUMNS, *forced], dtype="object")
    real = ["mean", "lo", "hi", "kept", "context_tokens", "seen_share", "majority"]
    whole = ["budget", "chunk", "evicted_layers", "layers", "n", "n_fit", "n_empty", "n_skipped", "n_failed"]
    frame = frame.astype({**dict.fromkeys(real, "float64"), **dict.fromkeys(whole, "Int64")})
    inside = rows.sort_index()  # the file's order
    policies = list(dict.fromkeys([FULL, *inside["spec"]]))
    ranks = {"task": list(dict.fromkeys(inside["task_spec"])), "policy": policies, "metric": list(names)}
    keys = frame.assign(**{name: frame[name].map(order.index) for name, order in ranks.items()})
    order = keys.sort_values(["task", *SETTING[1:], "metric", "policy", "budget"], kind="stable").index
    ready = frame.loc[order].reset_index(drop=True)
    ready.attrs = rows.attrs
    return ready
