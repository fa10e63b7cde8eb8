"""What is compared side by side on the page: one task under one setting, with its rows and curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from ...contract.cell import FULL
from ...stats.aggregate import aggregate, prepare_rows
from ...stats.compare import compare_all, per_sample
from ...stats.panels import SETTING, main_metric, split_panels
from ..footnotes import only_pins
from ..plot import BESIDE, looks_of
from ..style import LOWER, UPPER, Style

NOISE = 1e-5  # what the order of a batch may change in float32: values so close are equal
CURVE = [*SETTING, "policy", "budget", "pins", "family"]  # what a row and its aggregated line share


@dataclass(frozen=True)
class Panel:
    """One task under one setting.

    lines: aggregated, with labels (see `kvbench.stats.panels`). rows: those behind the lines, prepared, with
    the label of their line as `curve`. main: the task's main metric. looks: the style of each label.
    """

    setting: Mapping[str, Any]
    lines: pd.DataFrame
    rows: pd.DataFrame
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
        """Metrics that policies are judged by: the main one, and kl."""
        return [name for name in self.metrics if name in (self.main, "kl")]

    def of(self, metric: str) -> pd.DataFrame:
        return self.measured[self.measured["metric"] == metric]

    def pairs(self, metric: str) -> pd.DataFrame:
        """Every two curves (see `every_pair`), compared by this metric or what it is made of."""
        if metric not in self._pairs:
            self._pairs[metric] = compare_all(self.rows, per_sample(metric))
        return self._pairs[metric]

    @cached_property
    def _pairs(self) -> dict[str, pd.DataFrame]:
        return {}

    def role(self, label: str) -> str:
        """What a label is, beside a policy: "full cache", "upper bracket", "lower bracket", or ""."""
        if label in self.full:
            return "full cache"
        return {UPPER: "upper bracket", LOWER: "lower bracket"}.get(self.looks[label].line, "")


def panels_of(
    rows: pd.DataFrame, tasks: Mapping[str, Any], declared: Mapping[str, Any]
) -> tuple[list[Panel], pd.DataFrame]:
    """Panels with a number in them, and all aggregated lines.

    rows: as `read_rows` gives them. tasks, declared: sections of the manifests (see `plot.sections`).
    """
    lines = aggregate(rows)
    found = split_panels(lines)
    looks = looks_of([part for _, part in found], declared)
    ready = prepare_rows(rows)
    made = [
        Panel(setting, part, _behind(ready, part), main_metric(part, setting["task"], tasks), looks)
        for setting, part in found
    ]
    return [panel for panel in made if len(panel.measured)], lines


def _behind(ready: pd.DataFrame, lines: pd.DataFrame) -> pd.DataFrame:
    """The rows of these lines."""
    curves = lines[[*CURVE, "label"]].drop_duplicates(CURVE).rename(columns={"label": "curve"})
    rows = ready.reset_index().merge(curves, on=CURVE, how="inner").set_index("index")
    return rows.drop_duplicates(["curve", "budget", "seed", "sample"])


def words(items: Sequence[object]) -> str:
    """ "64", "64 and 128", "64, 128 and 256"."""
    texts = [str(item) for item in items]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}" if texts else ""
