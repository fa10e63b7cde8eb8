"""What is always kept: each policy's pins, their share of the budget, and the difference they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from ...contract.cell import FULL
from ...contract.metrics import Metric, describe
from ...errors import BadInput
from ...stats.compare_rules import compare_rules
from ...stats.panels import SETTING, shorten
from ...store.frame import metrics_of
from ..footnotes import pins_total
from ..panel import Panel
from ..words import difference_text, probability

SAME = [name for name in SETTING if name != "pins_mode"]


@dataclass(frozen=True)
class Shares:
    """One rule of pins. rows: (policy, pins in words, share of each budget; only pins where 1 or more)."""

    rule: str
    budgets: list[int]
    rows: list[tuple[str, str, list[float | None]]]


@dataclass(frozen=True)
class Effect:
    """Another rule of pins minus the native one, by one metric of one task: a table.

    same: policies whose pins are the same under both rules.
    """

    title: str
    budgets: list[int]
    rows: list[list[str]]
    same: list[str]


def share_pins(panels: Sequence[Panel]) -> list[Shares]:
    """Per rule of pins, what each policy keeps for sure."""
    if not panels:
        return []
    lines = pd.concat([panel.measured for panel in panels])
    lines = lines[lines["budget"].notna()].drop_duplicates(["pins_mode", "policy", "budget", "pins"])
    found = []
    for rule, part in lines.groupby("pins_mode", sort=False):
        budgets = sorted({int(budget) for budget in part["budget"]})
        rows = []
        for _, own in part.groupby(["policy", "pins"], sort=False):
            policy, pins = str(own["policy"].iloc[0]), str(own["pins"].iloc[0])
            there = {int(budget) for budget in own["budget"]}
            total = pins_total(pins)
            rows.append(
                (shorten(policy), _describe(pins), [total / b if b in there else None for b in budgets])
            )
        found.append(Shares(str(rule), budgets, rows))
    return found


def _describe(pins: str) -> str:
    first, last = pins.split(",")
    parts = [f"{word} {count}" for word, count in (("first", first), ("last", last)) if count != "0"]
    return ", ".join(parts) or "none"


def compare_pins(rows: pd.DataFrame, panels: Sequence[Panel]) -> tuple[list[Effect], str]:
    """Where the same was run with native pins and under another rule: what that changes (`compare_rules`).

    rows: as `read_rows` gives them. Also returns why there is nothing to compare, or "".
    """
    metrics = list(dict.fromkeys(panel.per_sample(metric) for panel in panels for metric in panel.judged))
    try:
        frame = compare_rules(rows, "pins", metrics)
    except BadInput as error:
        return [], str(error).removeprefix("--versus pins: ")
    pinned = rows[rows["spec"] != FULL].groupby(["task_spec", "spec", "pins_mode"])["pins"].agg(set)
    found = []
    for _, part in frame.groupby([*SETTING, "metric"], sort=False, dropna=False):
        task, rule = part["task"].iloc[0], part["pins_mode"].iloc[0]
        alike = [
            policy
            for policy in dict.fromkeys(part["policy"])
            if pinned[task, policy, rule] == pinned[task, policy, "native"]
        ]
        found.append(_effect(part, alike))
    return found, ""


def _effect(part: pd.DataFrame, alike: Sequence[str]) -> Effect:
    first = part.iloc[0]
    lines = part[~part["policy"].isin(alike)]
    budgets = sorted({int(budget) for budget in lines["budget"]})
    rows, metric = [], describe(first["metric"], metrics_of(part))
    for policy, own in lines.groupby("policy", sort=False):
        cells = {int(line["budget"]): _cell(line, metric) for line in own.to_dict("records")}
        rows.append([shorten(str(policy)), *(cells.get(budget, "") for budget in budgets)])
    title = f"{first['task']}, {metric.label}: pins {first['pins_mode']} minus native pins"
    return Effect(title, budgets, rows, [shorten(policy) for policy in alike])


def _cell(line: Mapping[Any, Any], metric: Metric) -> str:
    low, high = (difference_text(line[end], metric) for end in ("lo", "hi"))
    return f"{difference_text(line['difference'], metric)} [{low},{high}] p {probability(line['p_holm'])}"
