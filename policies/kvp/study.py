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
from kvbench.eviction_error import ErrorConfig, measure
from kvbench.results import read_rows
from kvbench.trace import TraceSet

from .command import make_card, write
from .train import RECIPES, Lesson, TrainConfig, train

VARIANTS: dict[str, dict[str, Any]] = {
    "shipped": {},
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
    "no-pins": {"pins": "none"},
}
TIGHT, MIDDLE = 32, 128


def train_variants(
    names: list[str], traces: TraceSet, folder: Path, changes: dict[str, Any]
) -> dict[str, Path]:
    """Train every variant whose file is not there yet; variants with the same splits share utilities."""
    lessons: dict[str, Lesson] = {}
    files = {name: folder / f"{name}.safetensors" for name in names}
    for name in sorted(names, key=lambda name: str(VARIANTS[name].get("split"))):
        if files[name].exists():
            continue
        recipe: TrainConfig = replace(RECIPES["cpu"], **{**changes, **VARIANTS[name]})
        if recipe.split not in lessons:
            lessons.clear()  # one course in memory at a time
            lessons[recipe.split] = Lesson.prepare(recipe, traces)
        weights, cost = train(recipe, lessons[recipe.split])
        write(files[name], weights, recipe, traces, make_card(recipe, traces, cost))
        typer.echo(f"trained {name}: validation cost {cost:.3f}")
    return files


def offline(files: dict[str, Path], others: list[str], heldout: str, out: Path, pins: str) -> pd.DataFrame:
    """Mean eviction cost and missed mass per policy, at the boundary and at uniform splits."""
    specs = tuple([f"kvp:weights={file}" for file in files.values()] + others)
    columns: dict[str, pd.Series[Any]] = {}
    for split in ("boundary", "uniform"):
        path = out / f"offline-{split}-pins-{pins.replace(',', '-')}"
        config = ErrorConfig(heldout, specs, (TIGHT, MIDDLE), split, pins=pins, out=str(path))
        measure(config, progress=False)
        rows = read_rows(path)
        for budget, label in ((TIGHT, "tight"), (MIDDLE, "middle")):
            part = rows[rows["budget"] == budget].groupby("spec")
            columns[f"{split} missed@{label}"] = part["metric:missed_mass"].mean()
        columns[f"{split} cost"] = (
            rows[rows["budget"] == TIGHT].groupby("spec")["metric:eviction_cost"].mean()
        )
    return pd.DataFrame(columns)


def needle(files: dict[str, Path], others: list[str], out: Path, task: str, limit: int) -> pd.DataFrame:
    """Share of needles found per policy and budget; every variant shares one prefill per sample."""
    specs = [f"kvp:weights={file}" for file in files.values()] + others
    config = kvbench.RunConfig(
        tuple(specs), (task,), (64, 128, 256), limit=limit, pins="4,16", out=str(out / task.replace(":", "-"))
    )
    result = kvbench.run(config)
    found = result.rows[result.rows["policy"] != "full"]
    table = found.pivot_table(index="spec", columns="budget", values="metric:string_match")
    return table.rename(columns=lambda budget: f"{task}@{budget}")


def main(
    traces: Annotated[str, typer.Option(help="Training traces.")],
    heldout: Annotated[str, typer.Option(help="Held-out traces: other seeds, other fillers.")],
    out: Annotated[str, typer.Option(help="Folder for weights, rows and tables.")],
    steps: Annotated[int, typer.Option(help="Steps of every variant.")] = RECIPES["cpu"].steps,
    only: Annotated[str | None, typer.Option(help="Variants, comma-separated; default: all.")] = None,
    others: Annotated[str, typer.Option(help="Other policies for the table.")] = "tova,snapkv,knorm,keydiff",
    limit: Annotated[int, typer.Option(help="Needles.")] = 24,
    length: Annotated[str, typer.Option(help="Needle lengths.")] = "1024",
) -> None:
    """Train the variants, measure them, write the tables."""
    folder = Path(out)
    names = only.split(",") if only else list(VARIANTS)
    files = train_variants(names, TraceSet(traces), folder / "weights", {"steps": steps})
    baselines = [name for name in others.split(",") if name]
    parts = [offline(files, baselines, heldout, folder, "4,16")]
    parts += [needle(files, baselines, folder, f"needle:length={n}", limit) for n in length.split(",")]
    table = pd.concat(parts, axis=1)
    table.index = pd.Index([Path(spec.removeprefix("kvp:weights=")).stem for spec in table.index])
    table.to_csv(folder / "study.csv", index_label="variant")
    text = table.round(3).to_markdown()
    (folder / "study.md").write_text(text + "\n")
    typer.echo(text)


if __name__ == "__main__":
    typer.run(main)
