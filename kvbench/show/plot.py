"""Figures from stored results: a metric against the absolute budget, with intervals.

Nothing is run here, and neither torch nor the engine is imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from ..contract.metrics import is_known
from ..errors import StoreError, UnknownName
from ..stats.aggregate import list_metrics
from ..stats.panels import describe_setting
from ..store.files import file_name
from ..store.results import read_rows
from .canvas import FONT, WIDTH, add_axes, add_heading, new_figure, save
from .chart import Chart, chart_of
from .curves import draw_chart, legend_keys
from .panel import BESIDE, build_panels, read_declarations, run_folder
from .words import sample_count


def plot(
    paths: str | Path | Iterable[str | Path],
    metric: str | None = None,
    out: str | Path | None = None,
    workers: int = 1,
) -> list[Path]:
    """Draw the results of one or more run folders: a PNG, an SVG and a CSV per task, setting and metric.

    metric: one name, or several separated by commas; None draws each task's main metric and BESIDE.
    out: folder for the files, else `figures` in the first run folder. workers: processes that draw; with 1
    this one does. Equal results give equal SVG bytes.
    Returns the files. Raises: UnknownName for a metric that the results lack, listing those
    they have; StoreError when there is nothing to draw or no place for it.
    """
    several = [Path(paths)] if isinstance(paths, str | Path) else [Path(path) for path in paths]
    rows = read_rows(several)
    asked = None if metric is None else [name.strip() for name in metric.split(",")]
    known = list_metrics(rows)
    for name in asked or ():
        if name not in known:
            hint = "That metric exists but was not measured here." if is_known(name) else ""
            raise UnknownName("metric", name, known, hint)
    panels, _ = build_panels(rows, read_declarations(several), asked)
    base = Path(out) if out is not None else run_folder(several[0]) / "figures"
    sheets: list[Sheet] = []
    for panel, name in zip(panels, _file_names([panel.setting for panel in panels]), strict=True):
        for item in dict.fromkeys(asked or [panel.main, *BESIDE]):
            lines = panel.of(item)
            if len(lines):
                heading = _heading(lines, panel.setting)
                file = f"{name}-{file_name(item)}"
                shown = lines.drop(columns="only_pins")
                sheets.append(Sheet(chart_of(lines, panel.looks), heading, base, file, shown))
    if not sheets:
        raise StoreError(f"no usable rows in {several[0]}: `kvbench table` shows what was skipped or failed")
    return draw_sheets(sheets, workers)


@dataclass(frozen=True)
class Sheet:
    """One figure to be drawn, with everything that its process must know. lines: for the CSV beside it."""

    chart: Chart
    heading: Sequence[str]
    folder: Path
    name: str
    lines: pd.DataFrame

    def draw(self) -> list[Path]:
        """Returns the files. Raises: StoreError."""
        return save(draw_figure(self.chart, self.heading), self.folder, self.name, self.lines)


def draw_sheets(sheets: Sequence[Sheet], workers: int) -> list[Path]:
    """The files of all figures, in their order. Raises: StoreError."""
    workers = min(workers, len(sheets))
    if workers < 2:
        return [file for sheet in sheets for file in sheet.draw()]
    with ProcessPoolExecutor(workers) as pool:
        return [file for files in pool.map(Sheet.draw, sheets) for file in files]


def draw_figure(chart: Chart, heading: Sequence[str]) -> Figure:
    """One metric of one panel, as a figure that nothing else refers to."""
    fig = new_figure(WIDTH, 4.4)
    axes = add_axes(fig)[0, 0]
    draw_chart(axes, chart)
    add_heading(fig, heading)
    handles, _ = axes.get_legend_handles_labels()
    fig.legend(
        handles=[*handles, *legend_keys(chart)],
        loc="outside right center",
        frameon=False,
        fontsize=FONT - 2,
        handlelength=2.6,
    )
    return fig


def _heading(lines: pd.DataFrame, setting: Mapping[str, Any]) -> list[str]:
    model, rules = describe_setting(setting).split(", ", 1)
    n = sample_count(lines["n"])
    return [f"{setting['task']}, {model}, n = {n}", f"schedule {rules.split(', template')[0]}"]


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
