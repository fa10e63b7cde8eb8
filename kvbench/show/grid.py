"""Figures `budget-curves` and `learned`: tasks side by side, one legend for all.

Works on stored rows: neither torch nor the engine is imported.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.figure import Figure

from ..contract.cell import FULL
from ..contract.metrics import describe
from ..errors import BadInput, StoreError, UnknownName
from ..stats.aggregate import check_names, list_metrics
from ..stats.panels import RULE_COLUMNS
from ..store.files import file_name
from ..store.frame import metrics_of
from ..store.results import read_rows
from .canvas import FONT, WIDTH, add_axes, add_heading, new_figure, save
from .chart import BUDGET, Chart, chart_of
from .curves import draw_chart, legend_keys
from .figures import RUNS, Request, inputs, reference_folders
from .panel import Declarations, Panel, build_panels, read_declarations
from .words import sample_count

HINT = "name folders that kvbench run wrote; without any, those in results/reference are drawn"
COLUMNS = 2  # panels beside each other: more would be too small to read on half a page
WRAP = 38  # characters of a panel's title in a line
WORDS = {"schedule": "{}", "question": "question {}", "pins_mode": "pins {}", "template": "template {}"}

POOLED = [*RULE_COLUMNS, "spec", "weights", "budget", "pins"]  # what is pooled over tasks, and nothing else
SHOWN = ["task", "policy", "budget", "metric", "mean", "lo", "hi", "n", "model", "schedule", "chunk", "pins",
         "question"]  # fmt: skip


@dataclass(frozen=True)
class Tile:
    """One chart of the grid, and what it is of."""

    panel: Panel
    metric: str

    @property
    def lines(self) -> pd.DataFrame:
        return self.panel.of(self.metric)

    @cached_property
    def chart(self) -> Chart:
        return chart_of(self.lines, self.panel.looks)


def budget_curves(asked: Request) -> list[Path]:
    """A panel per task, setting and metric. Raises: KvbenchError for folders, metrics or policies that are
    not there."""
    return _draw(asked, "budget-curves", asked.policies)


def learned_curves(asked: Request) -> list[Path]:
    """The same for policies with learned weights, the full cache, and what no policy can beat."""
    return _draw(asked, "learned", None)


def _draw(asked: Request, name: str, policies: Sequence[str] | None) -> list[Path]:
    """policies: which curves; empty for all; None for those that learned."""
    paths = [Path(path) for path in inputs(asked, name, RUNS, reference_folders(), HINT)]
    rows = read_rows(paths)
    check_names(asked.metrics, list_metrics(rows))
    declared = read_declarations(paths)
    chosen = _find_learned(rows, declared.looks) if policies is None else _choose_policies(rows, policies)
    tiles = find_tiles(rows[rows["spec"].isin({FULL, *chosen})], declared, asked.metrics, asked.each)
    if not tiles:
        raise StoreError(f"no usable rows in {paths[0]}: `kvbench table` shows what was skipped or failed")
    shown = pd.concat([tile.lines for tile in tiles])[SHOWN]
    parts = [name, *asked.metrics, *(["each"] if asked.each else [])]
    return save(draw_grid(tiles), asked.out, file_name("-".join(parts)), shown, compact=True)


def find_tiles(
    rows: pd.DataFrame, declared: Declarations, metrics: Sequence[str] = (), each: bool = False
) -> list[Tile]:
    """What there is to draw. metrics: of every task; none: its main one. each: subtasks are not pooled."""
    rows, tasks = separate_runs(rows, declared.tasks)
    if not each:
        rows, tasks = pool_subtasks(rows, tasks)
    panels, _ = build_panels(rows, Declarations(tasks, declared.looks), metrics or None)
    tiles = [Tile(panel, metric) for panel in panels for metric in metrics or [panel.main]]
    return [tile for tile in tiles if (tile.lines["policy"] != FULL).any()]


def _find_learned(rows: pd.DataFrame, declared: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Specs that have learned weights, and the upper bracket; the lower one would only stretch the axis."""
    found = set(rows["spec"][rows["weights"].fillna("") != ""]) if "weights" in rows else set()
    if not found:
        raise BadInput("figure 'learned': no policy in these rows has learned weights; run one that has")
    return found | {spec for spec in rows["spec"] if declared.get(spec, {}).get("bracket") == "upper"}


def _choose_policies(rows: pd.DataFrame, policies: Sequence[str]) -> set[str]:
    known = {*rows["spec"]} - {FULL}
    for spec in policies:
        if spec not in known:
            raise UnknownName("policy", spec, known, "These are the policies in the results.")
    return set(policies) or known


def separate_runs(rows: pd.DataFrame, tasks: Mapping[str, Any]) -> tuple[pd.DataFrame, dict[str, Any]]:
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


def pool_subtasks(rows: pd.DataFrame, tasks: Mapping[str, Any]) -> tuple[pd.DataFrame, dict[str, Any]]:
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
        if describe(entry.get("metric", ""), metrics_of(rows)).limits == (0.0, 1.0):
            alike = ",".join(pair for pair in values.split(",") if "/" not in pair)  # files of data aside
            groups.setdefault((task.split("/")[0], entry["metric"], alike), []).append(spec)
    for (group, metric, values), members in groups.items():
        if len(members) > 1:
            name = f"{group}{values and ':' + values}, {len(members)} subtasks"
            entries[name] = {"metric": metric}
            renamed |= dict.fromkeys(members, name)
    named = rows["task_spec"].map(renamed)
    inside = named.notna()
    cells = [str(cell) for cell in rows[[column for column in POOLED if column in rows]].to_numpy().tolist()]
    rows = rows.assign(
        task_spec=named.where(inside, rows["task_spec"]),
        sample=(rows["task_spec"] + "|" + rows["sample"]).where(inside, rows["sample"]),
        family=pd.Series(cells, rows.index).where(inside, rows["family"]),
    )
    return rows, entries


def draw_grid(tiles: Sequence[Tile]) -> Figure:
    """Charts in reading order, the legend below them."""
    columns = min(COLUMNS, len(tiles))
    rows = math.ceil(len(tiles) / columns)
    common = _common([tile.panel.setting for tile in tiles])
    curves: dict[str, Artist] = {}  # by label: the same in every chart
    keys: dict[str, Artist] = {}
    fig = new_figure(WIDTH, 1.1 + 2.75 * rows)
    cells = add_axes(fig, rows, columns).flatten()
    for axes, tile in zip(cells, tiles, strict=False):
        draw_chart(axes, tile.chart, terse=True)
        axes.set_title(_tile_title(tile, common), fontsize=FONT - 2, loc="left")
        axes.set_ylabel(str(axes.get_ylabel()).replace(" (", "\n(", 1), fontsize=FONT - 1)
        axes.set_xlabel(textwrap.fill(BUDGET, 30), fontsize=FONT - 1)
        drawn, labels = axes.get_legend_handles_labels()
        curves |= dict(zip(labels, drawn, strict=True))
        keys |= {str(key.get_label()): key for key in legend_keys(tile.chart)}
    for index, axes in enumerate(cells):
        if index >= len(tiles):
            axes.remove()
        elif index + columns < len(tiles):  # one below says it
            axes.set_xlabel("")
    add_heading(fig, _heading(common))
    handles = [*curves.values(), *keys.values()]
    fig.legend(
        handles=handles, loc="outside lower center", ncols=3, frameon=False,
        fontsize=FONT - 2, handlelength=2.6,
    )  # fmt: skip
    fig.set_size_inches(WIDTH, 1.1 + 2.75 * rows + 0.22 * math.ceil(len(handles) / 3))
    return fig


def _common(settings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all charts share."""
    first = settings[0]
    return {name: value for name, value in first.items() if len({str(one[name]) for one in settings}) == 1}


def _rules(setting: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    words = [WORDS[name].format(setting[name]) for name in WORDS if name in names]
    if "chunk" in names and not pd.isna(setting["chunk"]):
        words.append(f"chunks of {setting['chunk']} tokens")
    return words + ([str(setting["model"])] if "model" in names else [])


def _tile_title(tile: Tile, common: Mapping[str, Any]) -> str:
    """The task, its samples, and the rules that other charts do not share."""
    setting, lines = tile.panel.setting, tile.lines
    own = [name for name in setting if name not in common]
    pairs = lines["context_tokens"].mean()
    size = [f"≈{pairs:.0f} tokens"] if math.isfinite(pairs) else []
    rest = ", ".join([f"n = {sample_count(lines['n'])}", *size, *_rules(setting, own)])
    return "\n".join([*textwrap.wrap(str(setting["task"]), WRAP), *textwrap.wrap(rest, WRAP)])


def _heading(common: Mapping[str, Any]) -> list[str]:
    model = [str(common["model"])] if "model" in common else []
    return [", ".join([*model, *_rules(common, [name for name in common if name != "model"])])]
