"""The figures of KVP's own study: what each training objective gives (figure 6b of the paper)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes

from kvbench.errors import BadInput
from kvbench.show.kit import (
    FONT,
    GREY,
    GRID,
    REFERENCE,
    WIDTH,
    Request,
    add_axes,
    add_heading,
    inputs,
    new_figure,
    round_numbers,
    save,
)

from ..study import PINS, VARIANTS
from . import STUDY
from .costs import draw_budget_cost
from .recorded_costs import rank_folders

HINT = "make one with python -m kvbench.policies.kvp.study --out FOLDER ..."
OBJECTIVES = [
    name for name, changes in VARIANTS.items() if set(changes) <= {"objective"} and name != "refreshed"
]
COLUMNS = {
    "boundary cost": "eviction cost\n(lower is better)",
    "boundary missed@tight": "missed mass at 32\n(lower is better)",
    "needle@64": "needles found at 64\n(higher is better)",
}


def objectives(asked: Request) -> list[Path]:
    """What the study measured of every objective, beside the other policies in its table.

    Raises: BadInput for a folder without the study's table.
    """
    default = [str(REFERENCE / "kvp")] if (REFERENCE / "kvp" / "study.csv").is_file() else []
    (path, *more) = inputs(asked, "objectives", STUDY, default, HINT)
    if more:
        raise BadInput(f"figure 'objectives' shows one study, {1 + len(more)} folders were given")
    table = _table(Path(path))
    fig = new_figure(WIDTH, 1.6 + 0.33 * len(table))
    for axes, (column, label) in zip(
        add_axes(fig, 1, len(COLUMNS), sharey=True)[0], COLUMNS.items(), strict=True
    ):
        _dots(axes, table, column, label)
    add_heading(
        fig,
        [
            f"training objectives of kvp, and other policies; pins {PINS}; future from the question on",
            "means over traces and needles, one seed each; the study's table has no intervals",
        ],
    )
    return save(fig, asked.out, "objectives", round_numbers(table), compact=True)


def _table(path: Path) -> pd.DataFrame:
    """Objectives and policies of a study, by cost."""
    try:
        table = pd.read_csv(path / "study.csv")
        table = table[["variant", *COLUMNS]]
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(f"{path} has no usable study.csv ({error}): {HINT}") from error
    kept = table["variant"].isin(OBJECTIVES) | ~table["variant"].isin(VARIANTS)
    table = table[kept].sort_values("boundary cost")
    learned = table["variant"].isin(OBJECTIVES)
    return table.assign(learned=learned, variant=table["variant"].map(_name))


def _name(variant: str) -> str:
    objective = VARIANTS.get(variant, {}).get("objective", "softcost" if variant == "base" else variant)
    return str(objective)


def _dots(axes: Axes, table: pd.DataFrame, column: str, label: str) -> None:
    places = range(len(table))
    colors = ["#0072b2" if learned else GREY for learned in table["learned"]]
    axes.hlines(places, 0, table[column], color="#dddddd", linewidth=1.0, zorder=1)
    axes.scatter(table[column], places, c=colors, zorder=2)
    for place, value in zip(places, table[column], strict=True):
        axes.annotate(
            f"{value:.2f}", (value, place), (5, 0), textcoords="offset points", va="center", fontsize=FONT - 3
        )
    axes.set_yticks(places, list(table["variant"]))
    axes.set_xlim(0, table[column].max() * 1.3)
    axes.set_ylim(len(table) - 0.5, -0.5)
    axes.set_xlabel(label, fontsize=FONT - 1)
    axes.grid(axis="x", **GRID)


def objectives_by_budget(asked: Request) -> list[Path]:
    """Eviction cost of every budget for each objective's weights, on the given traces.

    The weights never learned to rank the pinned tokens, so these are pinned unless asked otherwise.
    Raises: BadInput for a folder without weights.
    """
    study, *traces = inputs(asked, "objectives-by-budget", STUDY, [], HINT)
    files = [Path(study) / "weights" / f"{name}.safetensors" for name in OBJECTIVES]
    there = [file for file in files if file.is_file()]
    if not there:
        raise BadInput(f"{study} has no weights of {', '.join(OBJECTIVES)}: {HINT}")
    within = replace(asked, paths=tuple(traces), pins=asked.pins or PINS)
    named = {f"kvp:weights={file}": _name(file.stem) for file in there}
    found, looks = rank_folders(within, "objectives-by-budget", [*named, "oracle"])
    found = [replace(costs, names=costs.names | named) for costs in found]
    rows = ["budget_cost", "over_oracle"]
    return draw_budget_cost(found, looks, within, "objectives-by-budget", rows)
