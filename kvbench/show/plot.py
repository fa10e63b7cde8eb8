"""Figures from stored results: a metric against the absolute budget, with intervals.

Nothing is run here, and neither torch nor the engine is imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

from ..contract.cell import FULL
from ..contract.metrics import is_known
from ..errors import StoreError, UnknownName
from ..stats.aggregate import aggregate, list_metrics
from ..stats.panels import describe_setting, main_metric, split_panels
from ..store.files import file_name
from ..store.manifest import MANIFEST, read_manifest
from ..store.results import read_rows
from .canvas import FONT, RC, WIDTH, counted, heading, save
from .curves import curve_keys, draw_curves
from .style import Style, styles

BESIDE = ("agreement", "kl", "missed_mass", "eviction_cost")  # drawn beside a task's main metric


def plot(
    paths: str | Path | Iterable[str | Path], metric: str | None = None, out: str | Path | None = None
) -> list[Path]:
    """Draw the results of one or more run folders: a PNG, an SVG and a CSV per task, setting and metric.

    metric: one name, or several separated by commas; None draws each task's main metric and BESIDE.
    out: folder for the files, else `figures` in the first run folder. Equal results give equal SVG
    bytes. Returns the files. Raises: UnknownName for a metric that the results lack, listing those
    they have; StoreError when there is nothing to draw or no place for it.
    """
    several = [Path(paths)] if isinstance(paths, str | Path) else [Path(path) for path in paths]
    rows = read_rows(several)
    asked = None if metric is None else [name.strip() for name in metric.split(",")]
    for name in asked or ():
        if name not in list_metrics(rows):
            hint = "That metric exists but was not measured here." if is_known(name) else ""
            raise UnknownName("metric", name, list_metrics(rows), hint)
    tasks, declared = sections(several)
    found = split_panels(aggregate(rows, asked))
    looks = looks_of([lines for _, lines in found], declared)
    files: list[Path] = []
    for (setting, lines), name in zip(found, _file_names([setting for setting, _ in found]), strict=True):
        for item in dict.fromkeys(asked or [main_metric(lines, setting["task"], tasks), *BESIDE]):
            part = lines[(lines["metric"] == item) & (lines["n"] > 0)]
            if len(part):
                base = Path(out) if out is not None else home(several[0]) / "figures"
                files += save(figure(part, setting, looks), base, f"{name}-{file_name(item)}", part)
    if not files:
        raise StoreError(f"no usable rows in {several[0]}: `kvbench table` shows what was skipped or failed")
    return files


def figure(lines: pd.DataFrame, setting: Mapping[str, Any], looks: Mapping[str, Style]) -> Figure:
    """One metric of one panel (see kvbench.panels), as a figure that nothing else refers to."""
    with matplotlib.rc_context(RC):
        fig = Figure(figsize=(WIDTH, 4.4), layout="constrained")
        axes = fig.subplots()
        draw_curves(axes, lines, looks)
        heading(fig, _title(lines, setting))
        handles, _ = axes.get_legend_handles_labels()
        fig.legend(
            handles=[*handles, *curve_keys(lines[lines["policy"] != FULL], looks)],
            loc="outside right center",
            frameon=False,
            fontsize=FONT - 2,
            handlelength=2.6,
        )
    return fig


def sections(paths: Sequence[Path]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tasks and style sections of all manifests; bare row files go without."""
    tasks: dict[str, Any] = {}
    declared: dict[str, Any] = {}
    for path in paths:
        if (home(path) / MANIFEST).exists():
            manifest = read_manifest(home(path))
            tasks |= manifest.get("tasks", {})
            declared |= manifest.get("style", {})
    return tasks, declared


def home(path: Path) -> Path:
    return path.parent if path.suffix == ".jsonl" else path


def looks_of(parts: Sequence[pd.DataFrame], declared: Mapping[str, Any]) -> dict[str, Style]:
    """Styles by label; where two runs differ, each run's curve has a colour of its own."""
    extended = dict(declared)
    labels: list[str] = []
    for lines in parts:
        for policy, label in dict.fromkeys(zip(lines["policy"], lines["label"], strict=True)):
            labels.append(label)
            if label != policy:
                extended[label] = {**declared.get(policy, {}), "color": None}
    return styles(labels, extended)


def _title(lines: pd.DataFrame, setting: Mapping[str, Any]) -> list[str]:
    model, rules = describe_setting(setting).split(", ", 1)
    n = counted([int(n) for n in lines["n"]])
    return [f"{setting['task']}, {model}, {n}", f"schedule {rules.split(', template')[0]}"]


def _file_names(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The task, and what tells panels of one task apart."""
    names = []
    for setting in settings:
        rivals = [other for other in settings if other["task"] == setting["task"]]
        parts = [str(setting["task"])]
        for field in setting:
            if len({str(other[field]) for other in rivals}) > 1:
                parts.append(f"{field}={setting[field]}")
        names.append(file_name("-".join(parts)))
    return names
