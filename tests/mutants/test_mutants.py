"""The mutations apply to the code as it is; that the tests catch them is for `make mutants` to see."""

from __future__ import annotations

from pathlib import Path

import pytest

from .__main__ import ROOT, main, table
from .mutation import Mutation, mutation
from .run import CAUGHT, SURVIVED, failing_anyway, run_all
from .table import MUTATIONS


@pytest.mark.parametrize("one", MUTATIONS, ids=lambda one: one.broken)
def test_it_applies(one: Mutation) -> None:
    """Its text is there once, and so are its tests."""
    assert one.fault(ROOT) == ""
    compile((ROOT / one.file).read_text("utf-8").replace(one.old, one.new), one.file, "exec")


def test_every_law_is_broken_and_nothing_twice() -> None:
    assert {one.law for one in MUTATIONS} >= {str(law) for law in range(1, 11)}
    assert len({one.broken for one in MUTATIONS}) == len(MUTATIONS)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository of one function and three tests, one of which always fails."""
    root = tmp_path / "project"
    for folder in ("kvbench", "policies", "tasks", "results", "tests"):
        (root / folder).mkdir(parents=True)
    (root / "kvbench" / "__init__.py").write_text("def double(x):\n    return 2 * x\n")
    (root / "tests" / "test_it.py").write_text(
        "from kvbench import double\n\n\n"
        "def test_two():\n    assert double(2) == 4\n\n\n"
        "def test_zero():\n    assert double(0) == 0\n\n\n"
        "def test_never():\n    assert double(1) == 3\n"
    )
    return root


def test_the_verdict(project: Path) -> None:
    """One that is noticed, one that is not, one whose second test does not notice, one that cannot run."""
    old = "    return 2 * x\n"

    def of(new: str, *tests: str) -> Mutation:
        named = [f"test_it.py::{test}" for test in tests]
        return mutation("1", new, "kvbench/__init__.py", old, new, *named)

    noticed, survives = of("    return 3 * x\n", "test_two"), of("    return 3 * x  #\n", "test_zero")
    half, broken = of("    return x * x * x\n", "test_two", "test_zero"), of("    return (\n", "test_two")
    anyway = of("    return 4 * x\n", "test_never")
    found = dict(run_all(project, [noticed, survives, half, broken, anyway], jobs=2))
    assert {one: outcome.verdict for one, outcome in found.items()} == {
        noticed: CAUGHT, survives: SURVIVED, half: SURVIVED, broken: "BROKEN", anyway: CAUGHT,
    }  # fmt: skip
    assert found[noticed].failed == ("tests/test_it.py::test_two",)
    assert failing_anyway(project, [*found[noticed].failed, *found[anyway].failed]) == {
        "tests/test_it.py::test_never"
    }
    assert (project / "kvbench" / "__init__.py").read_text().endswith(old)


def test_what_no_longer_applies_is_told(project: Path) -> None:
    file, test = "kvbench/__init__.py", "test_it.py::test_two"
    assert "0 times" in mutation("1", "", file, "gone", "x", test).fault(project)
    assert "no test" in mutation("1", "", file, "2 * x", "x", "test_it.py::test_gone").fault(project)
    assert "0 times" in mutation("1", "", "gone.py", "2 * x", "x", test).fault(project)


def test_the_table_is_chosen_by_a_part_of_anything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--only", "mcnemar"]) == 0
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) == 3
    assert "`test_b58_paired_on_the_same_samples`" in printed
    assert len(table([(one, "") for one in MUTATIONS]).splitlines()) == len(MUTATIONS) + 2
