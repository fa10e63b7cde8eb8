"""The committed figures are whole, small, and say what the committed rows say."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from kvbench.show import grid
from kvbench.show.figures import Request, figure_kind
from kvbench.store.manifest import shown_data
from tests.figures.capture import unsaved

RESULTS = Path(__file__).parents[2] / "results"
FOLDER = RESULTS / "reference" / "figures"
OF_RUNS = {
    "budget-curves": ("ruler-1024-paper", "oasst", "boolq", "needle-1024"),
    "budget-curves-kl": ("boolq", "oasst"),
    "learned": ("needle-1024", "oasst"),
    "learned-kl": ("boolq", "oasst"),
}


def test_every_image_shows_the_numbers_beside_it() -> None:
    names = {file.stem for file in FOLDER.iterdir()}
    assert len(names) > 10
    for name in names:
        mark = shown_data((FOLDER / f"{name}.csv").read_bytes()).encode()
        assert all(mark in (FOLDER / f"{name}.{end}").read_bytes() for end in ("png", "svg")), name
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 3_000_000


def test_the_page_shows_them_all() -> None:
    text = (RESULTS / "FIGURES.md").read_text(encoding="utf-8")
    shown = re.findall(r"reference/figures/([a-z_-]+)\.png", text)
    assert sorted(shown) == sorted(file.stem for file in FOLDER.glob("*.png"))
    for name, folders in OF_RUNS.items():
        kind, _, metric = name.partition("-kl")
        runs = f"results/reference/{{{','.join(folders)}}}"
        assert f"`{kind} {runs}{' --metric kl' if name != kind else ''}`" in text, metric


@pytest.mark.parametrize("name", ["budget-curves", "learned-kl"])  # the others are of the same rows
def test_figures_of_runs_say_what_the_rows_say(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Means and counts; the intervals are left out, because they take long."""
    nothing = (np.nan, np.nan)
    monkeypatch.setattr("kvbench.stats.aggregate.intervals", lambda items: [nothing] * len(items))
    paths = tuple(str(RESULTS / "reference" / folder) for folder in OF_RUNS[name])
    metrics = ("kl",) if name.endswith("-kl") else ()
    with unsaved(grid) as kept:
        figure_kind(name.removesuffix("-kl")).draw(Request(paths, metrics=metrics))
    same = ["task", "policy", "budget", "metric", "mean", "n"]
    pd.testing.assert_frame_equal(kept[name][same], pd.read_csv(FOLDER / f"{name}.csv")[same])
