"""One rule against another: what is compared, and that the figure shows it."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure

from kvbench.errors import BadInput, StoreError
from kvbench.show import versus as module
from kvbench.show.versus import versus
from kvbench.store.results import Store

from .synthetic import row

CHUNKED = {"schedule": "chunked", "chunk": 64}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    """Figures by name, not written."""
    found: dict[str, Figure] = {}

    def keep(fig: Figure, folder: Path, name: str, lines: pd.DataFrame) -> list[Path]:
        found[name] = fig
        return [folder / name]

    monkeypatch.setattr(module, "save", keep)
    return found


def store(folder: Path, rows: list[dict[str, object]]) -> Path:
    with Store.open(folder, {}, {}) as opened:
        opened.append(rows)
    return folder


def means(fig: Figure) -> list[set[float]]:
    """Per budget, where the markers of the policies stand."""
    return [
        {float(line.get_xdata()[0]) for line in axes.lines if line.get_marker() == "o"}  # type: ignore[index]
        for axes in fig.axes
    ]


def test_each_policy_and_budget_under_both_schedules(tmp_path: Path, drawn: dict[str, Figure]) -> None:
    rows = [row("full", None, metrics={"kl": 0.0})]
    for i, (budget, change) in enumerate((b, c) for b in (32, 64) for c in ({}, CHUNKED)):
        rows.append(row("knorm", budget, metrics={"kl": 1.0 + i}, **change))
    rows.append(row("tova", 32, metrics={"kl": 9.0}))  # not run in chunks: nothing to compare
    versus([store(tmp_path, rows)], "schedule", ["kl"])
    (fig,) = drawn.values()
    assert [axes.get_title() for axes in fig.axes] == ["budget 32", "budget 64"]
    assert means(fig) == [{1.0, 2.0}, {3.0, 4.0}]
    assert [text.get_text() for text in fig.legends[0].get_texts()] == [
        "prefill", "chunked, 64 tokens", "full cache",
    ]  # fmt: skip
    fig.draw_without_rendering()


def test_the_full_cache_of_the_same_rules_is_the_line(tmp_path: Path, drawn: dict[str, Figure]) -> None:
    rows = [
        row("full", None, metrics={"kl": 0.25}),
        row("full", None, "s1", metrics={"kl": 0.75}, question="seen"),  # another setting
        row("knorm", 32, metrics={"kl": 1.0}),
        row("knorm", 32, metrics={"kl": 2.0}, pins_mode="4,16", pins=[4, 16]),
    ]
    versus([store(tmp_path, rows)], "pins", ["kl"])
    (fig,) = drawn.values()
    vertical = [line.get_xdata() for line in fig.axes[0].lines if line.get_color() == "black"]
    assert [list(points) for points in vertical] == [[0.25, 0.25]]


def test_rules_that_differ_in_more_are_not_compared(tmp_path: Path) -> None:
    rows = [row("knorm", 32), row("knorm", 32, question="seen", **CHUNKED)]
    with pytest.raises(StoreError, match="no task has rows under two values"):
        versus([store(tmp_path, rows)], "question", [])


def test_an_unknown_rule_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="choose one of schedule, question, pins"):
        versus([tmp_path], "colour", [])


def test_files_are_named_by_task_metric_and_rule(tmp_path: Path) -> None:
    rows = [row("knorm", 32), row("knorm", 32, question="seen")]
    files = versus([store(tmp_path, rows)], "question", ["accuracy"])
    assert [file.name for file in files] == [
        f"boolq-accuracy-question.{end}" for end in ("png", "svg", "csv")
    ]
    assert all(file.stat().st_size > 1000 for file in files[:2])
