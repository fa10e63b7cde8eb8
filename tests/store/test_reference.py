"""The committed results hold together, and the README says what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbench.audit.verify import verify
from kvbench.contract.metrics import METRICS
from kvbench.show.words import number
from kvbench.stats.aggregate import aggregate
from kvbench.store.results import ROWS, read_rows

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "results" / "reference"
RUNS = sorted(file.parent.name for file in REFERENCE.glob(f"*/{ROWS}*"))


@pytest.mark.parametrize("name", RUNS)
def test_rows_manifest_and_figures_belong_together(name: str) -> None:
    findings = list(verify([REFERENCE / name]))
    assert [finding for finding in findings if not finding.passed] == []
    assert any("says what the rows say" in finding.law for finding in findings)  # there are figures


def test_the_table_in_the_readme_is_the_committed_runs() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    start = next(index for index, line in enumerate(text) if line.startswith("| needles found"))
    budgets = [int(cell) for cell in text[start].split("|")[2:-1]]
    rows = read_rows(REFERENCE / "prose-1024")
    lines = aggregate(rows[rows["task_spec"] == "ruler/niah_single_2:haystack=python"], ["string_match"])
    assert len(budgets) > 2
    checked = 0
    for line in text[start + 2 :]:
        if not line.startswith("| "):
            break
        label, *cells = (cell.strip() for cell in line.split("|")[1:-1])
        policy = label.split(" (")[0].replace("full cache", "full")
        mine = lines[lines["policy"] == policy]
        assert len(mine), label
        for budget, cell in zip(budgets, cells, strict=True):
            found = mine if policy == "full" else mine[mine["budget"] == budget]
            values = [found[name].iloc[0] for name in ("mean", "lo", "hi")]
            mean, low, high = (number(value, METRICS["string_match"]) for value in values)
            assert cell == (mean if low == high else f"{mean} [{low},{high}]"), (label, budget)
            checked += 1
    assert checked >= 10 * len(budgets)
