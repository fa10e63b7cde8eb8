"""Every policy against every other at one budget, on the same samples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...contract.metrics import Metric
from ...stats.panels import shorten
from ...stats.significance import ALPHA
from ..panel import Panel
from ..scale import NOISE
from ..words import difference_text, probability, sample_count


@dataclass(frozen=True)
class Entry:
    """Row minus column. verdict: "better", "worse", or "" where the corrected test does not say."""

    verdict: str
    difference: str
    interval: str
    outcomes: str
    p: str


@dataclass(frozen=True)
class Matrix:
    """All pairs at one budget. rows: (label, cells in the order of the labels, None for itself)."""

    budget: int
    labels: list[str]
    rows: list[tuple[str, list[Entry | None]]]
    pairs: int
    separated: int
    n: str


def matrices(panel: Panel, metric: str) -> list[Matrix]:
    """One matrix per budget."""
    frame = panel.pairs(metric)
    about = panel.about(panel.per_sample(metric))
    found = []
    for _, lines in frame.groupby("budget", sort=True):
        budget = int(lines["budget"].iloc[0])
        there = {*lines["policy"], *lines["baseline"]}
        labels = [label for label in panel.order if label in there]
        cells: dict[tuple[str, str], Entry] = {}
        for line in lines.to_dict("records"):
            one, other = line["policy"], line["baseline"]
            cells[one, other] = _entry(line, about, 1)
            cells[other, one] = _entry(line, about, -1)
        rows = [(shorten(label), [cells.get((label, other)) for other in labels]) for label in labels]
        separated = sum(entry.verdict == "better" for entry in cells.values())
        n = sample_count(lines["n"])
        tested = int(lines["p_holm"].notna().sum())
        found.append(Matrix(budget, [shorten(x) for x in labels], rows, tested, separated, n))
    return found


def _entry(line: Mapping[Any, Any], metric: Metric, sign: int) -> Entry:
    """sign: -1 for the pair the other way round."""
    difference = sign * line["difference"] + 0.0  # no -0.0
    win, loss = (line["win"], line["loss"]) if sign > 0 else (line["loss"], line["win"])
    verdict = ""
    if line["p_holm"] < ALPHA and abs(difference) > NOISE and metric.better != "none":
        verdict = "better" if (difference > 0) == (metric.better == "higher") else "worse"
    ends = sorted((sign * line["lo"] + 0.0, sign * line["hi"] + 0.0)) if math.isfinite(line["lo"]) else []
    interval = f"[{','.join(difference_text(end, metric) for end in ends)}]" if ends else ""
    outcomes = f"{win}/{line['tie']}/{loss}"
    return Entry(
        verdict, difference_text(difference, metric), interval, outcomes, probability(line["p_holm"])
    )
