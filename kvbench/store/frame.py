"""Rows as a pandas frame, each column of one type."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

INTEGERS = (
    "schema", "budget", "chunk", "seed", "context_tokens", "question_tokens", "cut_tokens", "evicted_layers",
    "layers",
)  # fmt: skip
TEXTS = (
    "key", "config", "family", "policy", "spec", "params", "task", "task_spec", "task_params", "model",
    "schedule", "pins", "pins_mode", "question", "template", "data", "sample", "status", "reason", "note",
    "text", "gold_label", "label",
)  # fmt: skip


def frame(stored: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Text columns are plain objects, because the string type of pandas rejects lone surrogates."""
    rows = [_flat(row) for row in stored]
    names = dict.fromkeys([*TEXTS, *INTEGERS, "kept", *(name for row in rows for name in row)])
    columns: dict[str, pd.Series] = {}
    for name in names:
        values = [row.get(name) for row in rows]
        if name in INTEGERS:
            columns[name] = pd.Series(values, dtype="Int64")
        elif name == "kept" or name.startswith(("metric:", "time:")):
            numbers = [np.nan if value is None else float(value) for value in values]
            columns[name] = pd.Series(numbers, dtype="float64")
        else:
            columns[name] = pd.Series(values, dtype="object")
    return pd.DataFrame(columns)


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if name in ("metrics", "times"):
            prefix = name[:-1]
            flat.update({f"{prefix}:{key}": number for key, number in (value or {}).items()})
        elif name == "pins":
            flat[name] = None if value is None else ",".join(str(number) for number in value)
        elif isinstance(value, dict | list):
            flat[name] = json.dumps(value, sort_keys=True)
        else:
            flat[name] = value
    return flat
