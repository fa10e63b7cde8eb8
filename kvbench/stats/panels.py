"""Which aggregated lines may be compared side by side: tables and figures show one panel each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import pandas as pd

from ..contract.cell import FULL
from ..contract.metrics import METRICS
from ..store.frame import metrics_of, source_of

RULE_COLUMNS = ["model", "schedule", "chunk", "question", "template", "pins_mode"]
LINE_NAMES = {"task_spec": "task", "spec": "policy"}  # rows say name and spec, lines name a thing by its spec
ROW_SETTING = ["task_spec", *RULE_COLUMNS]  # columns of rows
SETTING = ["task", *RULE_COLUMNS]  # the same of lines
RULES = {"schedule": ("schedule", "chunk"), "question": ("question",), "pins": ("pins_mode",)}
SHARED = ["model", "question", "template"]  # what the full cache depends on, beside the task


def split_panels(frame: pd.DataFrame) -> list[tuple[dict[str, Any], pd.DataFrame]]:
    """Split aggregated lines into what may be compared side by side: (setting, lines).

    The full cache belongs to every panel it is valid for, whatever the schedule and the pins. A
    `label` column names each curve: the policy, and the run folder where two runs differ. The setting
    also says the seeds that its lines have.
    """
    full = frame[frame["policy"] == FULL]
    rest = frame[frame["policy"] != FULL]
    found: list[tuple[dict[str, Any], pd.DataFrame]] = []
    for _, part in rest.groupby(SETTING, sort=False, dropna=False):
        setting = _setting(part)
        own = full[matches(full, setting, SETTING)]
        lines = pd.concat([own if len(own) else full[matches(full, setting, ["task", *SHARED])], part])
        found.append((setting, _add_labels(lines)))
    if rest.empty:
        for _, part in full.groupby(SETTING, sort=False, dropna=False):
            found.append((_setting(part), _add_labels(part)))
    return found


def _setting(lines: pd.DataFrame) -> dict[str, Any]:
    seeds = {int(seed) for text in lines["seeds"] for seed in text.split(",") if seed}
    return {name: lines[name].iloc[0] for name in SETTING} | {"seeds": join_seeds(seeds)}


def join_seeds(seeds: Iterable[int]) -> str:
    """ "0,1,2" of any seeds, each once, ascending."""
    return ",".join(map(str, sorted(set(seeds))))


def matches(frame: pd.DataFrame, setting: Mapping[str, Any], names: Sequence[str]) -> pd.Series:
    """Lines that agree with the setting in these columns; a missing value equals a missing one."""
    keep = pd.Series(True, index=frame.index)
    for name in names:
        keep &= _same(frame[name], setting[name])
    return keep


def _same(column: pd.Series, value: Any) -> pd.Series:
    return column.isna() if pd.isna(value) else (column == value).fillna(False).astype(bool)


def _add_labels(lines: pd.DataFrame) -> pd.DataFrame:
    sources = [source_of(lines, config).removeprefix("file ") for config in lines["config"]]
    lines = lines.assign(label=lines["policy"], source=sources)
    full = lines["policy"] == FULL
    again = lines.duplicated(["metric", "policy", "mean", "lo", "hi", "n", "source"])  # under two schedules
    others = lines.loc[~full, "source"]  # there may be data that no policy was run on under these rules
    foreign = ~lines["source"].isin(others if len(others) else lines["source"])
    lines = lines[~(full & (again | foreign))]
    sources = list(lines["source"])
    lines = lines.drop(columns="source")
    for names in (list(lines["run"]), sources, [family[:6] for family in lines["family"]]):
        lines = _tell_apart(lines, names)
    alike = {label for label, name in short_names(lines["label"]).items() if name != shorten(label)}
    labels = [f"{label} ({_paths(label)})" if label in alike else label for label in lines["label"]]
    return lines.assign(label=labels)


def _tell_apart(lines: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """Labels that name two curves also say this, where it tells them apart."""
    twice = lines.duplicated(["metric", "label", "budget"], keep=False)
    several = set(lines.loc[twice, "label"])
    known: dict[str, set[str]] = {}
    for label, name in zip(lines["label"], names, strict=True):
        known.setdefault(label, set()).add(name)
    labels = [
        f"{label} ({name})" if label in several and name and len(known[label]) > 1 else label
        for label, name in zip(lines["label"], names, strict=True)
    ]
    return lines.assign(label=labels)


def main_metric(lines: pd.DataFrame, task: str, tasks: Mapping[str, Mapping[str, Any]] | None) -> str:
    """The metric a task is about: what the manifest says, else the first that its lines have.

    tasks: {task or spec: {"metric": name}}.
    """
    names = list(dict.fromkeys(lines["metric"]))
    entry = (tasks or {}).get(task) or (tasks or {}).get(task.split(":")[0]) or {}
    if entry.get("metric") in names:
        return str(entry["metric"])
    return next((name for name in [*METRICS, *metrics_of(lines)] if name in names), names[0])


def describe_setting(setting: Mapping[str, Any]) -> str:
    """The rules of a panel in a few words, task aside."""
    chunk = "" if pd.isna(setting["chunk"]) else f" of {setting['chunk']} tokens"
    pins = "native (each policy's own)" if setting["pins_mode"] == "native" else setting["pins_mode"]
    seeds = setting["seeds"]
    return (
        f"{setting['model']}, {setting['schedule']}{chunk}, question {setting['question']}, "
        f"pins {pins}, template {setting['template']}, seed{'s' if ',' in seeds else ''} {seeds}"
    )


def shorten(label: str) -> str:
    """A spec for display: of a parameter that is a path only the file's stem, which names it well enough.

    What a label says in brackets behind the spec stays.
    """
    spec, bracket, more = label.partition(" (")
    name, colon, rest = spec.partition(":")
    pairs = [piece.partition("=") for piece in rest.split(",")] if colon else []
    shown = [
        f"{key}{equals}{PurePath(value).stem if '/' in value else value}" for key, equals, value in pairs
    ]
    return name + colon + ",".join(shown) + bracket + more


def short_names(labels: Iterable[str]) -> dict[str, str]:
    """Each label as `shorten` shows it; those that would look alike also say their paths."""
    shown = {label: shorten(label) for label in labels}
    count = Counter(shown.values())
    return {
        label: f"{name} ({_paths(label)})" if count[name] > 1 and _paths(label) else name
        for label, name in shown.items()
    }


def _paths(label: str) -> str:
    """The values of a spec that are paths."""
    pieces = label.partition(" (")[0].partition(":")[2].split(",")
    return ", ".join(piece.partition("=")[2] for piece in pieces if "/" in piece)
