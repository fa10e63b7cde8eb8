"""What is compared side by side: one task under one setting, with its lines, rows and looks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from ..contract.cell import FULL
from ..contract.metrics import Metric, describe
from ..stats.aggregate import CELL, LABELS, aggregate, prepare_rows
from ..stats.compare import compare_all, per_sample
from ..stats.panels import LINE_NAMES, main_metric, split_panels
from ..store.frame import metrics_of
from ..store.manifest import MANIFEST, read_manifest
from .footnotes import only_pins
from .style import LOWER, UPPER, Style, assign_styles

BESIDE = ("agreement", "kl", "missed_mass", "eviction_cost")  # shown beside a task's main metric


@dataclass(frozen=True)
class Panel:
    """One task under one setting.

    lines: aggregated, with labels (see `split_panels`). ready: prepared rows, those behind the lines among
    them. main: the task's main metric. looks: the style of each label.
    """

    setting: Mapping[str, Any]
    lines: pd.DataFrame
    ready: pd.DataFrame
    main: str
    looks: Mapping[str, Style]

    @property
    def task(self) -> str:
        return str(self.setting["task"])

    @cached_property
    def measured(self) -> pd.DataFrame:
        """Lines with a number, and whether their budget has room beyond the pins."""
        lines = self.lines[self.lines["n"] > 0]
        return lines.assign(only_pins=only_pins(lines))

    @cached_property
    def order(self) -> list[str]:
        """Labels: policies as they come, then the brackets, the full cache last."""
        labels = dict.fromkeys(self.measured["label"])
        return sorted(labels, key=lambda label: (label in self.full, self.looks[label].bracket))

    @cached_property
    def full(self) -> list[str]:
        """Labels of the full cache; two where two runs differ."""
        lines = self.measured
        return list(dict.fromkeys(lines.loc[lines["policy"] == FULL, "label"]))

    @cached_property
    def brackets(self) -> list[str]:
        """Labels of policies that bound the others."""
        return [label for label in self.order if self.looks[label].bracket]

    @cached_property
    def candidates(self) -> list[str]:
        """Labels that can be the best policy: neither the full cache nor a bracket."""
        return [label for label in self.order if label not in self.full and not self.looks[label].bracket]

    @cached_property
    def budgets(self) -> list[int]:
        return sorted({int(budget) for budget in self.measured["budget"].dropna()})

    @cached_property
    def metrics(self) -> list[str]:
        """Metrics to show: the main one, then those beside it."""
        there = set(self.measured["metric"])
        return [name for name in dict.fromkeys([self.main, *BESIDE]) if name in there]

    @cached_property
    def judged(self) -> list[str]:
        """Metrics that policies are judged by: the main one, and kl. No shares of labels."""
        return [name for name in self.metrics if name in (self.main, "kl") and name not in LABELS]

    def about(self, metric: str) -> Metric:
        return describe(metric, metrics_of(self.lines))

    def per_sample(self, metric: str) -> str:
        """What samples are compared by."""
        return per_sample(metric, metrics_of(self.lines))

    def of(self, metric: str) -> pd.DataFrame:
        """Lines of one metric that have a number."""
        return self.measured[self.measured["metric"] == metric]

    @cached_property
    def rows(self) -> pd.DataFrame:
        """The rows behind the lines, each with the label of its line as `curve`."""
        cell = [LINE_NAMES.get(name, name) for name in CELL]
        curves = self.lines[[*cell, "label"]].drop_duplicates(cell)
        curves = curves.rename(columns={"label": "curve", **{line: row for row, line in LINE_NAMES.items()}})
        rows = self.ready.reset_index().merge(curves, on=list(CELL), how="inner").set_index("index")
        rows = rows.drop_duplicates(["curve", "budget", "seed", "sample"])
        rows.attrs = self.ready.attrs
        return rows

    def pairs(self, metric: str) -> pd.DataFrame:
        """Every two curves (see `compare_all`), compared by this metric or what it is made of."""
        if metric not in self._pairs:
            self._pairs[metric] = compare_all(self.rows, self.per_sample(metric), self.brackets)
        return self._pairs[metric]

    @cached_property
    def _pairs(self) -> dict[str, pd.DataFrame]:
        return {}

    def role(self, label: str) -> str:
        """What a label is, beside a policy: "full cache", "upper bracket", "lower bracket", or ""."""
        if label in self.full:
            return "full cache"
        return {UPPER: "upper bracket", LOWER: "lower bracket"}.get(self.looks[label].line, "")


@dataclass(frozen=True)
class Declarations:
    """What the manifests of some run folders say about drawing: tasks ({task: {"metric": name}}) and the
    looks that policies declare ({spec: {"color", "dashed", "bracket"}})."""

    tasks: dict[str, Any]
    looks: dict[str, Any]


def build_panels(
    rows: pd.DataFrame, declared: Declarations, metrics: Sequence[str] | None = None
) -> tuple[list[Panel], pd.DataFrame]:
    """All panels, also those without a number in them, and all aggregated lines.

    rows: as `read_rows` gives them. metrics: None for all that the rows have.
    """
    lines = aggregate(rows, metrics)
    found = split_panels(lines)
    looks = looks_of([part for _, part in found], declared.looks)
    ready = prepare_rows(rows)
    panels = [
        Panel(setting, part, ready, main_metric(part, setting["task"], declared.tasks), looks)
        for setting, part in found
    ]
    return panels, lines


def looks_of(parts: Sequence[pd.DataFrame], declared: Mapping[str, Any]) -> dict[str, Style]:
    """Styles by label; where two runs differ, each run's curve has a colour of its own."""
    extended = dict(declared)
    labels: list[str] = []
    for lines in parts:
        for policy, label in dict.fromkeys(zip(lines["policy"], lines["label"], strict=True)):
            labels.append(label)
            if label != policy:
                extended[label] = {**declared.get(policy, {}), "color": None}
    return assign_styles(labels, extended)


def read_declarations(paths: Sequence[Path]) -> Declarations:
    """Of all manifests; bare row files go without."""
    tasks: dict[str, Any] = {}
    looks: dict[str, Any] = {}
    for path in paths:
        if (run_folder(path) / MANIFEST).exists():
            manifest = read_manifest(run_folder(path))
            tasks |= manifest.get("tasks", {})
            looks |= manifest.get("style", {})
    return Declarations(tasks, looks)


def run_folder(path: Path) -> Path:
    """The folder of a run that was named by itself or by its rows."""
    return path.parent if path.suffix == ".jsonl" else path
