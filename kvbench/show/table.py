"""Aggregated lines as text, Markdown, CSV or JSON."""

from __future__ import annotations

import io
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ..contract.cell import FULL
from ..contract.metrics import METRICS, Metric, describe
from ..errors import BadInput
from ..stats.panels import describe_setting, main_metric, shorten, split_panels
from ..store.frame import metrics_of
from .footnotes import footnotes
from .words import join, number

FORMATS = ("text", "md", "csv", "json")
WIDTH = 140  # columns, where there is no terminal
COSTS = ("s", "bytes", "pairs", "tokens/s", "FLOP", "FLOP/s")  # units of what is measured along the way
Tasks = Mapping[str, Mapping[str, Any]]


def render(frame: pd.DataFrame, fmt: str = "text", tasks: Tasks | None = None) -> str:
    """An aggregated frame as one string.

    fmt: "text" and "md" show, per task and setting, one block per metric (the main one first): a
    row per policy, a column per budget, cells "mean [lo,hi]", footnotes below. "csv" and "json" are
    the lines themselves, JSON with null for no budget and for no number.
    tasks: the manifest's section, {task: {"metric": main metric}}.
    Raises: BadInput for another format.
    """
    if fmt == "json":
        return json_lines(frame)
    if fmt == "csv":
        return frame.to_csv(index=False, lineterminator="\n")
    if fmt not in FORMATS:
        raise BadInput(f"--format '{fmt}': choose one of {', '.join(FORMATS)}")
    parts: list[str] = []
    for setting, lines in split_panels(frame):
        shown, hidden = _blocks(lines, main_metric(lines, setting["task"], tasks))
        parts.append(heading(f"{setting['task']}: {describe_setting(setting)}", fmt))
        parts += [_block(lines[lines["metric"] == name], name, fmt) for name in shown]
        notes = footnotes(lines)
        if hidden:
            notes.append(f"Measured too, and in the csv and json formats: {join(hidden)}.")
        parts.append("\n".join(f"* {note}" for note in notes))
    return "\n\n".join(part for part in parts if part) + "\n"


def headline(frame: pd.DataFrame, tasks: Tasks | None = None) -> pd.DataFrame:
    """Only the lines of each task's main metric (see render for `tasks`)."""
    parts = []
    for task, lines in frame.groupby("task", sort=False):
        parts.append(lines[lines["metric"] == main_metric(lines, str(task), tasks)])
    return pd.concat(parts).reset_index(drop=True) if parts else frame


def json_lines(frame: pd.DataFrame) -> str:
    """One object per line. pins become a pair of numbers."""
    objects = []
    for line in frame.astype(object).to_dict("records"):
        item = {str(name): _plain(value) for name, value in line.items()}
        if isinstance(item.get("pins"), str):
            item["pins"] = [int(number) for number in item["pins"].split(",")]
        objects.append(json.dumps(item))
    return "[\n" + ",\n".join(objects) + "\n]\n" if objects else "[]\n"


def _plain(value: Any) -> Any:
    """null for what is missing or not finite: JSON has no other way to say it."""
    if pd.isna(value) or (isinstance(value, float) and not math.isfinite(value)):
        return None
    return int(value) if pd.api.types.is_integer(value) else value


def _blocks(lines: pd.DataFrame, main: str) -> tuple[list[str], list[str]]:
    """Metrics to show, the main one first, and those left to the long formats."""
    names = [name for name in dict.fromkeys(lines["metric"]) if name not in (main, "majority_rate")]
    stored = metrics_of(lines)
    known = [*METRICS, *stored]
    order = [name for name in known if name in names] + [name for name in names if name not in known]
    derived = [] if main == "nll" else ["ppl"]  # says again what nll says, where it is not the point
    costs = [name for name in order if describe(name, stored).unit in COSTS or name in derived]
    shown = [name for name in order if name not in costs]
    if describe(main, stored).unit in COSTS:  # they were asked for
        return [main, *order], []
    return [main, *shown], costs


def heading(text: str, fmt: str) -> str:
    return f"## {text}" if fmt == "md" else text


def _block(lines: pd.DataFrame, metric: str, fmt: str) -> str:
    """One metric of one panel."""
    counts = sorted({int(n) for n in lines["n"] if n > 0})
    if len(counts) > 1:
        samples = f"n differs: {counts[0]} to {counts[-1]}, cells with fewer say so"
    else:
        samples = f"n = {counts[0] if counts else 0}"
    task = lines["task"].iloc[0]
    title = f"{task}: {describe(metric, metrics_of(lines)).label}, {samples}"
    return grid(title, *pivot(lines, metric), fmt)


def grid(title: str, header: Sequence[str], body: Sequence[Sequence[str]], fmt: str) -> str:
    """A titled table, "text" or "md": the first column to the left, numbers to the right."""
    if fmt == "md":
        return f"### {title}\n\n{_markdown(header, body)}"
    return f"{title}\n{text_table(header, body)}"  # a title of the table's own would wrap at its width


def text_table(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Columns for a terminal, the first one to the left; numbers are never cut."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(header):
        widest = max(len(word) for row in [header, *body] for word in (row[index].split() or [""]))
        table.add_column(name, justify="right" if index else "left", no_wrap=not index, min_width=widest)
    for row in body:
        table.add_row(*row)
    narrow = _console(shutil.get_terminal_size((WIDTH, 24)).columns)
    least = _console(10_000).measure(table).minimum  # below it numbers are cut; so the terminal wraps lines
    console = _console(max(narrow.width, least))
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().strip("\n").split("\n"))


def _console(width: int) -> Console:
    """Plain text only: intervals stand in square brackets."""
    return Console(
        file=io.StringIO(), width=width, markup=False, emoji=False, highlight=False, color_system=None
    )


def pivot(lines: pd.DataFrame, metric: str) -> tuple[list[str], list[list[str]]]:
    """Header and rows of one metric: policies as they come (full first), budgets ascending."""
    most, about = max(lines["n"], default=0), describe(metric, metrics_of(lines))
    columns: list[int | None] = [*sorted({int(budget) for budget in lines["budget"].dropna()})]
    names = [str(budget) for budget in columns]
    if (lines["policy"] == FULL).any():
        columns, names = [None, *columns], ["full cache", *names]
    cells: dict[str, dict[int | None, str]] = {}
    for line in lines[["label", "budget", "mean", "lo", "hi", "n", "n_failed"]].to_dict("records"):
        budget = None if pd.isna(line["budget"]) else int(line["budget"])
        cells.setdefault(line["label"], {})[budget] = _cell(line, about, most)
    body = [[shorten(label), *(mine.get(b, "") for b in columns)] for label, mine in cells.items()]
    return ["policy", *names], body


def _cell(line: Mapping[Any, Any], metric: Metric, most: int) -> str:
    if line["n"] == 0:
        return "failed" if line["n_failed"] else "skipped"
    text = number(line["mean"], metric)
    if math.isfinite(line["lo"]):
        text += f" [{number(line['lo'], metric)},{number(line['hi'], metric)}]"
    return text if line["n"] == most else f"{text} n={line['n']}"


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    safe = [[cell.replace("|", "\\|") for cell in row] for row in (header, *rows)]
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (safe[0], rule, *safe[1:]))
