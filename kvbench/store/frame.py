"""Rows as a pandas frame, each column of the type that `Row` declares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from ..contract.metrics import Metric
from .columns import FORMS, Form, columns
from .row import Row

# Attributes of a frame: the metrics which its runs declared, the policies that bound the others, and the data
# of each configuration.
STORED, BRACKETS, SOURCES = "metrics", "brackets", "sources"


def frame(
    rows: Sequence[Row], runs: Sequence[str], stored: Mapping[str, Metric], brackets: Iterable[str] = ()
) -> pd.DataFrame:
    """A column per field and axis, then `metric:NAME` and `time:NAME`, then `run`.

    runs: the folder of each row. stored: metrics that the runs declared. brackets: specs of policies that
    bound the others.
    """
    found: dict[str, pd.Series] = {}
    for column in columns():
        if column.name not in ("metrics", "times"):
            name = column.name
            values = [row.settings[name] if column.is_axis else getattr(row, name) for row in rows]
            found[name] = _series(values, column.form)
    for prefix in ("metric", "time"):
        measured: list[Mapping[str, float]] = [getattr(row, f"{prefix}s") for row in rows]
        for name in dict.fromkeys(name for one in measured for name in one):
            found[f"{prefix}:{name}"] = _series([one.get(name) for one in measured], FORMS[float])
    made = pd.DataFrame({**found, "run": pd.Series(list(runs), dtype="object")})
    sources = {row.config: row.data or "" for row in rows}
    made.attrs |= {STORED: dict(stored), BRACKETS: sorted(brackets), SOURCES: sources}
    return made


def metrics_of(lines: pd.DataFrame) -> Mapping[str, Metric]:
    """The metrics that the runs behind these rows, or lines made of them, declared."""
    declared: Mapping[str, Metric] = lines.attrs.get(STORED, {})
    return declared


def brackets_of(lines: pd.DataFrame) -> Sequence[str]:
    """The policies behind these rows, or lines made of them, that bound the others."""
    declared: Sequence[str] = lines.attrs.get(BRACKETS, [])
    return declared


def source_of(lines: pd.DataFrame, config: str) -> str:
    """The data of a configuration in words; "" where rows do not say it."""
    return str(lines.attrs.get(SOURCES, {}).get(config, ""))


def _series(values: list[Any], form: Form) -> pd.Series:
    if form.show is not None:
        shown: dict[str, Any] = {"None": None}  # many rows have equal ones
        texts = list(map(repr, values))
        for text, value in zip(texts, values, strict=True):
            if text not in shown:
                shown[text] = form.show(value)
        values = [shown[text] for text in texts]
    return pd.Series(values, dtype=form.dtype)
