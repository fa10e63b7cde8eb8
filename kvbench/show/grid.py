"""Figures `budget-curves` and `learned`: tasks side by side, one legend for all.

Works on stored rows: neither torch nor the engine is imported.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.figure import Figure

from ..contract.cell import FULL
from ..contract.metrics import describe
from ..errors import BadInput, StoreError, UnknownName
from ..stats.aggregate import aggregate, check_names, list_metrics
from ..stats.panels import SETTING, main_metric, split_panels
from ..store.files import file_name
from ..store.results import read_rows
from .canvas import FONT, RC, WIDTH, counted, heading, save
from .curves import BUDGET, curve_keys, draw_curves
from .figures import RUNS, Request, inputs, reference_folders
from .plot import looks_of, sections
from .style import Style

HINT = "name folders that kvbench run wrote; without any, those in results/reference are drawn"
COLUMNS = 2  # panels beside each other: more would be too small to read on half a page
WRAP = 38  # characters of a panel's title in a line
WORDS = {"schedule": "{}", "question": "question {}", "pins_mode": "pins {}", "template": "template {}"}

CELL = [*SETTING[1:], "spec", "weights", "budget", "pins"]  # what is pooled over tasks, and nothing else
SHOWN = ["task", "policy", "budget", "metric", "mean", "lo", "hi", "n", "model", "schedule", "chunk", "pins",
         "question"]  # fmt: skip

Panel = tuple[dict[str, Any], pd.DataFrame]  # what it shows; aggregated lines of one metric


def budget_curves(asked: Request) -> list[Path]:
    """A panel per task, setting and metric. Raises: KvbenchError for folders, metrics or policies that are
    not there."""
    return _draw(asked, "budget-curves", asked.policies)


def learned(asked: Request) -> list[Path]:
    """The same for policies with learned weights, the full cache, and what no policy can beat."""
    return _draw(asked, "learned", None)


def _draw(asked: Request, name: str, policies: Sequence[str] | None) -> list[Path]:
    """policies: which curves; empty for all; None for those that learned."""
    paths = [Path(path) for path in inputs(asked, name, RUNS, reference_folders(), HINT)]
    rows = read_rows(paths)
    check_names(asked.metrics, list_metrics(rows))
    tasks, declared = sections(paths)
    chosen = _learned(rows, declared) if policies is None else _named(rows, policies)
    rows, tasks = apart(rows[rows["spec"].isin({FULL, *chosen})], tasks)
    if not asked.each:
        rows, tasks = pooled(rows, tasks)
    found: list[Panel] = []
    for setting, lines in split_panels(aggregate(rows, asked.metrics or None)):
        for metric in asked.metrics or [main_metric(lines, setting["task"], tasks)]:
            part = lines[(lines["metric"] == metric) & (lines["n"] > 0)]
            if (part["policy"] != FULL).any():
                found.append((setting, part))
    if not found:
        raise StoreError(f"no usable rows in {paths[0]}: `kvbench table` shows what was skipped or failed")
    looks = looks_of([lines for _, lines in found], declared)
    shown = pd.concat([lines for _, lines in found])[SHOWN]
    parts = [name, *asked.metrics, *(["each"] if asked.each else [])]
    return save(grid(found, looks), asked.out, file_name("-".join(parts)), shown, compact=True)


def _learned(rows: pd.DataFrame, declared: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Specs that have learned weights, and the upper bracket; the lower one would only stretch the axis."""
    found = set(rows["spec"][rows["weights"].fillna("") != ""]) if "weights" in rows else set()
    if not found:
        raise BadInput("figure 'learned': no policy in these rows has learned weights; run one that has")
    return found | {spec for spec in rows["spec"] if declared.get(spec, {}).get("bracket") == "upper"}


def _named(rows: pd.DataFrame, policies: Sequence[str]) -> set[str]:
    known = {*rows["spec"]} - {FULL}
    for spec in policies:
        if spec not in known:
            raise UnknownName("policy", spec, known, "These are the policies in the results.")
    return set(policies) or known


def apart(rows: pd.DataFrame, tasks: Mapping[str, Any]) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Runs of one task that share no sample measured other things: each gets a task, named by its folder.

    tasks: {task: {"metric": name}}. Returns the rows, and tasks with the new names.
    """
    names, entries = rows["task_spec"].copy(), dict(tasks)
    for spec, part in rows.groupby("task_spec", sort=False):
        samples = [set(own["sample"]) for _, own in part.groupby("run", sort=False)]
        if len(samples) > 1 and sum(map(len, samples)) == len(set().union(*samples)):
            names[part.index] = [f"{spec} of {Path(run).name}" for run in part["run"]]
            entry = tasks.get(str(spec)) or tasks.get(str(spec).split(":")[0])
            entries |= dict.fromkeys(names[part.index], entry or {})
    return rows.assign(task_spec=names), entries


def pooled(rows: pd.DataFrame, tasks: Mapping[str, Any]) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Tasks "GROUP/NAME" of one group as one task, where their main metric is one that can be averaged.

    tasks: {task: {"metric": name}}. Perplexities of different texts are not averaged. Returns the rows, and
    tasks with the pooled ones.
    """
    renamed: dict[str, str] = {}
    entries = dict(tasks)
    specs = [spec for spec in dict.fromkeys(rows["task_spec"]) if "/" in spec.split(":")[0]]
    groups: dict[tuple[str, str, str], list[str]] = {}
    for spec in specs:
        task, _, values = spec.partition(":")
        entry = tasks.get(spec) or tasks.get(task) or {}
        if describe(entry.get("metric", "")).limits == (0.0, 1.0):
            alike = ",".join(pair for pair in values.split(",") if "/" not in pair)  # files of data aside
            groups.setdefault((task.split("/")[0], entry["metric"], alike), []).append(spec)
    for (group, metric, values), members in groups.items():
        if len(members) > 1:
            name = f"{group}{values and ':' + values}, {len(members)} subtasks"
            entries[name] = {"metric": metric}
            renamed |= dict.fromkeys(members, name)
    named = rows["task_spec"].map(renamed)
    inside = named.notna()
    cells = [str(cell) for cell in rows[[column for column in CELL if column in rows]].to_numpy().tolist()]
    rows = rows.assign(
        task_spec=named.where(inside, rows["task_spec"]),
        sample=(rows["task_spec"] + "|" + rows["sample"]).where(inside, rows["sample"]),
        family=pd.Series(cells, rows.index).where(inside, rows["family"]),
    )
    return rows, entries


def grid(found: Sequence[Panel], looks: Mapping[str, Style]) -> Figure:
    """Panels in reading order, the legend below them."""
    columns = min(COLUMNS, len(found))
    rows = math.ceil(len(found) / columns)
    common = _common([setting for setting, _ in found])
    with matplotlib.rc_context(RC):
        curves: dict[str, Artist] = {}  # by label: the same in every panel
        keys: dict[str, Artist] = {}
        fig = Figure(layout="constrained")
        cells = fig.subplots(rows, columns, squeeze=False).flatten()
        for axes, (setting, lines) in zip(cells, found, strict=False):
            draw_curves(axes, lines, looks, terse=True)
            axes.set_title(_panel_title(setting, lines, common), fontsize=FONT - 2, loc="left")
            axes.set_ylabel(str(axes.get_ylabel()).replace(" (", "\n(", 1), fontsize=FONT - 1)
            axes.set_xlabel(textwrap.fill(BUDGET, 30), fontsize=FONT - 1)
            drawn, labels = axes.get_legend_handles_labels()
            curves |= dict(zip(labels, drawn, strict=True))
            keys |= {str(key.get_label()): key for key in curve_keys(lines[lines["policy"] != FULL], looks)}
        for index, axes in enumerate(cells):
            if index >= len(found):
                axes.remove()
            elif index + columns < len(found):  # one below says it
                axes.set_xlabel("")
        heading(fig, _title(found, common))
        handles = [*curves.values(), *keys.values()]
        fig.legend(
            handles=handles, loc="outside lower center", ncols=3, frameon=False,
            fontsize=FONT - 2, handlelength=2.6,
        )  # fmt: skip
        fig.set_size_inches(WIDTH, 1.1 + 2.75 * rows + 0.22 * math.ceil(len(handles) / 3))
    return fig


def _common(settings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all panels share."""
    first = settings[0]
    return {name: value for name, value in first.items() if len({str(one[name]) for one in settings}) == 1}


def _rules(setting: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    told = [WORDS[name].format(setting[name]) for name in WORDS if name in names]
    if "chunk" in names and not pd.isna(setting["chunk"]):
        told.append(f"chunks of {setting['chunk']} tokens")
    return told + ([str(setting["model"])] if "model" in names else [])


def _panel_title(setting: Mapping[str, Any], lines: pd.DataFrame, common: Mapping[str, Any]) -> str:
    """The task, its samples, and the rules that other panels do not share."""
    own = [name for name in setting if name not in common]
    pairs = lines["context_tokens"].mean()
    size = [f"≈{pairs:.0f} tokens"] if math.isfinite(pairs) else []
    rest = ", ".join([counted([int(n) for n in lines["n"]]), *size, *_rules(setting, own)])
    return "\n".join([*textwrap.wrap(str(setting["task"]), WRAP), *textwrap.wrap(rest, WRAP)])


def _title(found: Sequence[Panel], common: Mapping[str, Any]) -> list[str]:
    model = [str(common["model"])] if "model" in common else []
    return [", ".join([*model, *_rules(common, [name for name in common if name != "model"])])]
