"""What the paper left open, measured: `python -m kvbench.policies.kvp.study --traces ... --heldout ...`.

Trains variants of the CPU recipe, then measures all of them together: eviction cost and missed mass on
held-out traces, needle accuracy on the live model. Writes study.csv and study.md; resumes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer

import kvbench
from kvbench.errors import BadInput
from kvbench.learn.eviction_error import ErrorConfig, measure
from kvbench.learn.trace import TraceSet
from kvbench.store.results import read_rows

from .command import make_card, write
from .course import TrainingSet
from .recipe import RECIPES, KVPRecipe
from .train import train

BASE = {"pinned_share": 1.0}  # what every variant changes in the recipe of the shipped weights
VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "split-uniform": {"split": "uniform"},
    "split-boundary": {"split": "boundary"},
    "budgets-log": {"budgets": "log"},
    "budgets-truncated": {"budgets": "truncated:128"},
    "rl": {"objective": "rl"},
    "rl-log": {"objective": "rl", "budgets": "log"},
    "rl-uniform-split": {"objective": "rl", "split": "uniform"},
    "regression": {"objective": "regression"},
    "ranknet": {"objective": "ranknet"},
    "listnet": {"objective": "listnet"},
    "softsort": {"objective": "softsort"},
    "weighted-softsort": {"objective": "weighted_softsort"},
    "position-none": {"position": "none"},
    "position-raw": {"position": "raw"},
    "position-normalised": {"position": "normalised"},
    "position-sinusoidal": {"position": "sinusoidal"},
    "pins-half": {"pinned_share": 0.5},
    "pins-none": {"pins": "none"},
    "refreshed": {},  # the same recipe on the traces of --refreshed
}
TIGHT, MIDDLE = 32, 128  # budgets
PINS = "4,16"


def train_variants(
    names: list[str], traces: TraceSet, refreshed: TraceSet | None, folder: Path, steps: int
) -> dict[str, Path]:
    """Train every variant whose file is not there yet; neighbours with the same splits share utilities."""
    files = {name: folder / f"{name}.safetensors" for name in names}
    lesson: tuple[tuple[TraceSet, str], TrainingSet] | None = None  # one course in memory at a time
    for name in sorted(names, key=lambda name: (name == "refreshed", str(VARIANTS[name].get("split")))):
        if files[name].exists():
            continue
        data = refreshed if name == "refreshed" else traces
        if data is None:
            raise BadInput("the variant 'refreshed' needs --refreshed: traces recorded with --under")
        recipe: KVPRecipe = replace(RECIPES["cpu"], **{"steps": steps, **BASE, **VARIANTS[name]})
        if lesson is None or lesson[0] != (data, recipe.split):
            lesson = None
            lesson = ((data, recipe.split), TrainingSet.prepare(recipe, data))
        weights, cost = train(recipe, lesson[1])
        write(files[name], weights, recipe, data, make_card(recipe, data, cost))
        typer.echo(f"trained {name}: validation cost {cost:.3f}")
    return files


def offline(
    specs: list[str], heldout: str, out: Path, splits: tuple[str, ...] = ("boundary", "uniform")
) -> pd.DataFrame:
    """Mean eviction cost (all budgets) and missed mass (a tight and a middle one) per policy."""
    columns: dict[str, pd.Series[Any]] = {}
    for split in splits:
        path = out / f"{Path(heldout).name}-{split}"
        config = ErrorConfig(heldout, tuple(specs), (TIGHT, MIDDLE), split, pins=PINS, out=str(path))
        measure(config, progress=False)
        rows = read_rows(path)
        for budget, label in ((TIGHT, "tight"), (MIDDLE, "middle")):
            part = rows[rows["budget"] == budget].groupby("spec")
            columns[f"{split} missed@{label}"] = part["metric:missed_mass"].mean()
        columns[f"{split} cost"] = (
            rows[rows["budget"] == TIGHT].groupby("spec")["metric:eviction_cost"].mean()
        )
    return pd.DataFrame(columns)


def needle(specs: list[str], out: Path, limit: int) -> pd.DataFrame:
    """Share of needles found per policy and budget; every variant shares one prefill per sample."""
    task = "needle:length=1024"
    config = kvbench.RunConfig(
        tuple(specs), (task,), (64, 128, 256), limit=limit, pins=PINS, out=str(out / "needle-1024")
    )
    result = kvbench.run(config)
    found = result.rows[result.rows["policy"] != "full"]
    table = found.pivot_table(index="spec", columns="budget", values="metric:string_match")
    return table.rename(columns=lambda budget: f"needle@{budget}")


def main(
    traces: Annotated[str, typer.Option(help="Training traces.")],
    heldout: Annotated[str, typer.Option(help="Held-out traces: other seeds, other fillers.")],
    out: Annotated[str, typer.Option(help="Folder for weights, rows and tables.")],
    heldout_long: Annotated[str | None, typer.Option(help="Held-out traces, four times as long.")] = None,
    refreshed: Annotated[str | None, typer.Option(help="Training traces recorded with --under.")] = None,
    steps: Annotated[int, typer.Option(help="Steps of every variant.")] = 400,
    only: Annotated[str | None, typer.Option(help="Variants, comma-separated; default: all.")] = None,
    others: Annotated[str, typer.Option(help="Other policies for the table.")] = "tova,snapkv,knorm,keydiff",
    limit: Annotated[int, typer.Option(help="Needles.")] = 24,
) -> None:
    """Train the variants, measure them, write the tables."""
    folder = Path(out)
    names = only.split(",") if only else [name for name in VARIANTS if refreshed or name != "refreshed"]
    again = TraceSet(refreshed) if refreshed else None
    files = train_variants(names, TraceSet(traces), again, folder / "weights", steps)
    specs = [f"kvp:weights={file}" for file in files.values()] + [name for name in others.split(",") if name]
    parts = [offline(specs, heldout, folder)]
    if heldout_long:
        long = offline(specs, heldout_long, folder, ("boundary",))
        parts.append(long.rename(columns=lambda name: f"4x length: {name}"))
    parts.append(needle(specs, folder, limit))
    table = pd.concat(parts, axis=1).loc[specs]
    table.index = pd.Index([Path(spec.removeprefix("kvp:weights=")).stem for spec in table.index])
    table.to_csv(folder / "study.csv", index_label="variant")
    text = table.round(3).to_markdown()
    (folder / "study.md").write_text(text + "\n")
    typer.echo(text)


if __name__ == "__main__":
    typer.run(main)
