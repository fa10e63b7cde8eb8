"""Figures of policies are plugins: they stand beside their policy and use what any plugin may use."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from kvbench.errors import PluginError
from kvbench.policies.kvp.policy import KVP
from kvbench.show.figures import ENGINE, FigureKind, kinds

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "policies").glob("*/figures/*.py"))
ALLOWED = ("kvbench.contract", "kvbench.errors", "kvbench.learn", "kvbench.show")


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parts[-3]}-{file.stem}")
def test_figures_of_a_policy_import_what_plugins_may(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        for name in names:
            assert not name.startswith("kvbench") or name.startswith(ALLOWED), name
            assert name != "matplotlib.pyplot"


def test_the_papers_figures_are_the_policys_own() -> None:
    own = {kind.name for kind in kinds()} - {kind.name for kind in ENGINE}
    assert {"importance", "rank-matrix", "budget-cost", "objectives"} <= own
    assert all(
        kind.target.startswith("kvbench.policies.kvp.figures.") for kind in kinds() if kind.name in own
    )


def test_the_list_of_figures_draws_nothing_and_needs_nothing_that_draws() -> None:
    slow = "{'torch', 'matplotlib', 'pandas'}"
    script = f"import sys, kvbench.policies.kvp.figures\nprint({slow} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_two_figures_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    again = (FigureKind("learned", "", "", "", (), "nowhere:nothing"),)
    monkeypatch.setattr("kvbench.policies.kvp.figures.FIGURES", again)
    assert KVP.figures == "kvbench.policies.kvp.figures:FIGURES"
    with pytest.raises(PluginError, match=r"figure 'learned' of .* is declared twice"):
        kinds()
