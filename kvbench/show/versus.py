"""Figures of one rule against another: what the schedule, the question or the pins change per policy."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ..contract.cell import FULL
from ..contract.metrics import describe
from ..errors import BadInput, StoreError
from ..stats.aggregate import aggregate
from ..stats.panels import RULES, SETTING, matches, shorten
from ..store.files import file_name
from ..store.frame import metrics_of
from ..store.results import read_rows
from .canvas import FONT, GRID, add_axes, add_heading, new_figure, save
from .panel import looks_of, read_declarations, run_folder
from .style import GREY, Style
from .words import sample_count


def versus(
    paths: Sequence[str | Path], field: str, metrics: Sequence[str], out: str | Path | None = None
) -> list[Path]:
    """Draw each metric under two values of one rule, policy by policy and budget by budget.

    field: "schedule", "question" or "pins". out: folder, else `figures` in the first run folder.
    Returns the files. Raises: BadInput for another field; UnknownName for a metric that the rows lack;
    StoreError where no task was run under two values with everything else equal.
    """
    if field not in RULES:
        raise BadInput(f"--versus '{field}': choose one of {', '.join(RULES)}")
    several = [Path(path) for path in paths]
    lines = aggregate(read_rows(several), list(metrics) or None)
    lines = lines[lines["n"] > 0].assign(label=lines["policy"], rule=_rules(lines, field))
    looks = looks_of([lines], read_declarations(several).looks)
    base = Path(out) if out is not None else run_folder(several[0]) / "figures"
    files: list[Path] = []
    for setting, part in _pairs(lines, field):
        for metric, found in part.groupby("metric", sort=False):
            both = _in_both(found[found["policy"] != FULL])
            if len(both):
                full = found[found["policy"] == FULL].drop_duplicates("mean")
                shown = pd.concat([both, full])
                name = file_name(f"{setting['task']}-{metric}-{field}")
                files += save(draw_figure(shown, setting, looks), base, name, shown)
    if not files:
        raise StoreError(
            f"--versus {field}: no task has rows under two values of it and everything else equal; run it "
            "again with the other value into the same folder, or name both folders"
        )
    return files


def _rules(lines: pd.DataFrame, field: str) -> list[str]:
    """The value of the rule, in words."""
    words = []
    for values in lines[list(RULES[field])].to_numpy():
        sized = len(values) > 1 and not pd.isna(values[1])
        words.append(f"{values[0]}, {values[1]} tokens" if sized else str(values[0]))
    return words


def _pairs(lines: pd.DataFrame, field: str) -> Iterable[tuple[dict[str, Any], pd.DataFrame]]:
    """(what is equal, lines) of every setting in which policies ran under two values or more."""
    shared = [name for name in SETTING if name not in RULES[field]]
    policies = lines[lines["policy"] != FULL]
    for _, part in policies.groupby(shared, sort=False, dropna=False):
        if part["rule"].nunique() > 1:
            setting = {name: part[name].iloc[0] for name in shared}
            same = [name for name in shared if name != "pins_mode"]  # the full cache has no pins
            full = lines[(lines["policy"] == FULL) & matches(lines, setting, same)]
            yield setting, pd.concat([part, full])


def _in_both(lines: pd.DataFrame) -> pd.DataFrame:
    """Lines of policies and budgets that have every value of the rule."""
    count = lines.groupby(["policy", "budget"])["rule"].transform("nunique")
    return lines[count == lines["rule"].nunique()]


def draw_figure(lines: pd.DataFrame, setting: Mapping[str, Any], looks: Mapping[str, Style]) -> Figure:
    """One metric: a column per budget, a line per policy, a marker per value of the rule."""
    rest = lines[lines["policy"] != FULL]
    policies = list(dict.fromkeys(rest["policy"]))
    budgets = sorted({int(budget) for budget in rest["budget"]})
    rules = sorted(set(rest["rule"]), key=lambda rule: (rule.startswith("chunked"), rule))
    metric = describe(str(lines["metric"].iloc[0]), metrics_of(lines))
    fig = new_figure(3.0 + 2.6 * len(budgets), 1.9 + 0.34 * len(policies))
    columns = add_axes(fig, 1, len(budgets), sharey=True)[0]
    for axes, budget in zip(columns, budgets, strict=True):
        _draw(axes, rest[rest["budget"] == budget], policies, rules, looks)
        for mean in lines[lines["policy"] == FULL]["mean"]:
            axes.axvline(mean, color="black", linewidth=1.2, zorder=1)
        axes.set_title(f"budget {budget}", fontsize=FONT - 1)
        axes.set_xlabel(metric.label)
        axes.grid(axis="x", **GRID)
    columns[0].set_yticks(range(len(policies)), [textwrap.fill(shorten(name), 24) for name in policies])
    columns[0].invert_yaxis()
    add_heading(fig, _heading(rest, setting), 70)
    dot: dict[str, Any] = {"linestyle": "", "marker": "o", "color": GREY}
    handles = [
        Line2D([], [], markerfacecolor=_fill(index, GREY), label=rule, **dot)
        for index, rule in enumerate(rules)
    ]
    handles.append(Line2D([], [], color="black", linewidth=1.2, label="full cache"))
    fig.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=FONT - 2)
    return fig


def _draw(
    axes: Axes, part: pd.DataFrame, policies: Sequence[str], rules: Sequence[str], looks: Mapping[str, Style]
) -> None:
    """Markers and 95% intervals of one budget, the values of a policy joined by a line."""
    for place, policy in enumerate(policies):
        mine = part[part["policy"] == policy].set_index("rule")
        if mine.empty:
            continue
        color = looks[policy].color
        mine = mine.loc[list(rules)]
        beside = [place + 0.3 * (index - (len(rules) - 1) / 2) for index in range(len(rules))]
        axes.plot(mine["mean"], beside, color=color, linewidth=1.0, alpha=0.5, zorder=2)
        axes.hlines(beside, mine["lo"], mine["hi"], color=color, linewidth=1.2, alpha=0.7, zorder=2)
        for index, mean in enumerate(mine["mean"]):
            axes.plot(mean, beside[index], "o", color=color, markerfacecolor=_fill(index, color), zorder=3)


def _fill(index: int, color: str) -> str:
    """The first value of the rule is drawn hollow."""
    return "white" if index == 0 else color


def _heading(rest: pd.DataFrame, setting: Mapping[str, Any]) -> list[str]:
    words = {"question": "question {}", "pins_mode": "pins {}", "schedule": "schedule {}"}
    equal = [words[name].format(setting[name]) for name in words if name in setting]
    n = sample_count(rest["n"])
    return [f"{setting['task']}, {setting['model']}, n = {n}", ", ".join(equal)]
