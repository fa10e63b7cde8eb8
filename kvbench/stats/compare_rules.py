"""A policy under one rule against itself under another: what the schedule, the question or the pins change.

Paired as in `kvbench.stats.compare`, on the samples that both have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from ..contract.cell import FULL
from ..contract.metrics import describe
from ..errors import BadInput
from ..store.frame import metrics_of
from .aggregate import check_names, list_metrics, prepare_rows
from .compare import add_flags, per_sample
from .pairs import COLUMNS, are_answers, match_samples, measure_pairs, order_lines, usable_rows, values_of
from .panels import LINE_NAMES, ROW_SETTING, RULES, SETTING, main_metric

USUAL = {"schedule": "prefill", "question": "withheld", "pins": "native"}  # what the others are compared with


def compare_rules(
    rows: pd.DataFrame, field: str, metrics: Sequence[str] | None = None,
    tasks: Mapping[str, Mapping[str, Any]] | None = None,
) -> pd.DataFrame:  # fmt: skip
    """Every policy under each other value of a rule minus itself under the usual one, per budget.

    rows: as `read_rows` gives them. field: "schedule", "question" or "pins"; everything else must be equal.
    metrics, tasks and the columns: as in `kvbench.stats.compare.compare`, with baseline
    the usual value in words.
    Raises: BadInput for another field, or where no policy ran under two values.
    """
    if field not in RULES:
        raise BadInput(f"--versus '{field}': choose one of {', '.join(RULES)}")
    if metrics is not None:
        check_names(metrics, list_metrics(rows))
    parts = []
    for task, own in rows.groupby("task_spec", sort=False):
        there = list_metrics(own)
        main = main_metric(pd.DataFrame({"metric": there}), str(task), tasks)
        asked = [per_sample(name, metrics_of(rows)) for name in metrics or (main, "kl")]
        parts += [_compare(own, field, name) for name in dict.fromkeys(asked) if name in there]
    found = [part for part in parts if len(part)]
    if not found:
        raise BadInput(
            f"--versus {field}: no policy has samples under '{USUAL[field]}' and under another value, with "
            "everything else equal; run it again with the other value, and name both folders"
        )
    return add_flags(pd.concat(found, ignore_index=True), rows)[[*COLUMNS, *SETTING[1:]]]


def _compare(rows: pd.DataFrame, field: str, metric: str) -> pd.DataFrame:
    rows = prepare_rows(rows)
    usable = usable_rows(rows, metric)
    lines, pairs = [], []
    for setting, mine, usual in _sides(usable[usable["spec"] != FULL], field):
        both = match_samples(values_of(mine), values_of(usual))
        if len(both):
            lines.append({**setting, "baseline": f"{field} {USUAL[field]}"})
            pairs.append(both)
    about = describe(metric, metrics_of(rows))
    lines = measure_pairs(lines, pairs, about, are_answers(usable, about))
    return order_lines(lines, rows)


def _sides(
    rows: pd.DataFrame, field: str
) -> Iterator[tuple[dict[str, Any], pd.DataFrame, pd.DataFrame]]:  # fmt: skip
    """(setting of the other value, its rows, the usual value's rows) of every policy and budget."""
    name, *more = RULES[field]
    cell = [*ROW_SETTING, "spec", "budget"]
    equal = [column for column in cell if column not in RULES[field]]
    for _, part in rows.groupby(equal, sort=False, dropna=False):
        usual = part[part[name] == USUAL[field]]
        others = part[part[name] != USUAL[field]]
        if len(usual) and len(others):
            for _, mine in others.groupby([name, *more], sort=False, dropna=False):
                setting = {LINE_NAMES.get(column, column): mine[column].iloc[0] for column in cell}
                yield setting, mine, usual
