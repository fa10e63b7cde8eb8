"""Where the numbers come from: model, versions, data, commands, and what is missing."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from ...stats.panels import shorten
from ...store.manifest import MANIFEST, read_manifest
from ..panel import run_folder


@dataclass(frozen=True)
class Source:
    """One run folder. facts: (name, value). data: (task, source, hash). commands: (command, what it took).
    missing: (task, policy, status and reason, budgets, samples). again: how to repeat it.
    """

    name: str
    facts: list[tuple[str, str]]
    data: list[tuple[str, str, str]]
    commands: list[tuple[str, str]]
    missing: list[tuple[str, str, str, str, int]]
    again: list[str]


def describe_sources(paths: Sequence[Path], names: Sequence[str], rows: pd.DataFrame) -> list[Source]:
    """What the manifest of each run says, and the samples without a result. rows: with `run` as in names."""
    return [_source(path, name, rows[rows["run"] == name]) for path, name in zip(paths, names, strict=True)]


def _source(path: Path, name: str, rows: pd.DataFrame) -> Source:
    folder = run_folder(path)
    manifest = read_manifest(folder) if (folder / MANIFEST).is_file() else {}
    counts = rows["status"].value_counts()
    facts = [
        ("rows", f"{len(rows)}" + "".join(f", {counts[s]} {s}" for s in ("skipped", "failed") if s in counts))
    ]
    facts += [("seeds", ", ".join(str(seed) for seed in sorted(set(rows["seed"].dropna()))))]
    for section in ("fixed", "versions", "machine"):
        facts += [(key.replace("_", " "), value) for key, value in _leaves(manifest.get(section, {}))]
    runs = manifest.get("runs", [])
    commands = [(str(run.get("command", "")), _describe_run(run)) for run in runs]
    again = [f"kvbench rerun {shlex.quote(name)}"] if any("settings" in run for run in runs) else []
    return Source(name, facts, _data(manifest), commands, _missing(rows), again)


def _leaves(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Scalars of a section of the manifest, as they are to be read."""
    found: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            found += [(f"{key} {inner}", text) for inner, text in _leaves(value)]
        elif isinstance(value, str | int | float):
            found.append((key, _gib(value) if key == "memory" and isinstance(value, int) else str(value)))
    return found


def _data(manifest: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    tasks = manifest.get("tasks", {})
    listed = [
        (str(entry.get("task")), str(entry.get("source")), key)
        for key, entry in manifest.get("data", {}).items()
    ]
    named = {task for task, _, _ in listed}
    return listed + [
        (task, str(entry.get("data", "")), str(entry.get("data_sha256", "")))
        for task, entry in tasks.items()
        if task not in named
    ]


def _describe_run(run: Mapping[str, Any]) -> str:
    parts = [str(run.get("started", ""))]
    if run.get("peak_bytes"):
        parts.append(f"peak memory {_gib(run['peak_bytes'])}")
    if run.get("executor"):
        parts.append(f"executor {run['executor']}")
    commit = run.get("versions", {}).get("commit")
    if commit:
        parts.append(f"commit {commit}")
    return ", ".join(part for part in parts if part)


def _missing(rows: pd.DataFrame) -> list[tuple[str, str, str, str, int]]:
    """Samples without a result by cause; budgets that share one are one line. Any text may be a reason, half
    a surrogate pair, too: pandas groups no such texts.
    """
    samples: dict[tuple[str, str, str], set[str]] = {}
    budgets: dict[tuple[str, str, str], set[int]] = {}
    for row in rows[rows["status"] != "ok"].to_dict("records"):
        why = f"{row['status']}: {row['reason'] or 'no reason given'}"
        cause = (str(row["task_spec"]), shorten(str(row["spec"])), why)
        samples.setdefault(cause, set()).add(row["sample"])
        budgets.setdefault(cause, set()).update([] if pd.isna(row["budget"]) else [int(row["budget"])])
    return [
        (*cause, ", ".join(map(str, sorted(budgets[cause]))), len(found)) for cause, found in samples.items()
    ]


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
