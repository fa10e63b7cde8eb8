"""Several seeds in one run: rows of their own, pooled by what they share."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvbench
from kvbench.errors import BadInput
from kvbench.store.manifest import read_manifest
from kvbench.study.runner import _default_folder
from tests.laws.runs import by_key, config, lines, recorded

FEW = {"policies": ("random", "knorm"), "tasks": ("laws_toy",), "budgets": (8,)}


@pytest.mark.usefixtures("toys")
def test_seeds_are_the_single_runs_together(folder: str, tmp_path: Path) -> None:
    together, _ = recorded(config(folder, tmp_path / "all", seeds=(0, 1, 2), **FEW))
    for seed in (0, 1, 2):
        recorded(config(folder, tmp_path / "one by one", seed=seed, **FEW))
    assert by_key(lines(tmp_path / "all")) == by_key(lines(tmp_path / "one by one"))
    table = together.table.set_index(["policy", "metric"])
    assert set(table["n"]) == {4}
    assert set(table["seeds"]) == {"0,1,2"}
    rows = together.rows[together.rows["spec"] == "random"]
    by_hand = rows.groupby("sample")["metric:kl"].mean().mean()
    assert table.loc[("random", "kl"), "mean"] == pytest.approx(by_hand)
    assert rows.groupby("sample")["metric:kl"].nunique().gt(1).all()  # the draws differ by seed


@pytest.mark.usefixtures("toys")
def test_a_new_seed_computes_only_its_own_rows(folder: str, tmp_path: Path) -> None:
    recorded(config(folder, tmp_path, seeds=(0, 1), **FEW))
    before = lines(tmp_path)
    recorded(config(folder, tmp_path, seeds=(2, 1, 0), **FEW))
    after = lines(tmp_path)
    assert after[: len(before)] == before
    assert {row["seed"] for row in after[len(before) :]} == {2}


@pytest.mark.parametrize("task", ["needle:length=900", "laws_toy"])
@pytest.mark.usefixtures("toys")
def test_samples_that_differ_by_seed_have_other_ids_and_data(folder: str, tmp_path: Path, task: str) -> None:
    settings = config(folder, tmp_path, seeds=(0, 1), limit=1, **FEW | {"tasks": (task,)})
    result, _ = recorded(settings)
    generated = task.startswith("needle")
    assert result.rows["sample"].nunique() == (2 if generated else 1)
    assert result.rows.groupby("spec")["family"].nunique().eq(1).all()
    assert result.rows.groupby("spec")["config"].nunique().eq(2).all()
    known = read_manifest(tmp_path)["data"]
    assert sorted(str(entry["seed"]) for entry in known.values()) == (["0", "1"] if generated else ["None"])


def test_seeds_share_the_default_folder_of_seed_0() -> None:
    one = kvbench.RunConfig(("knorm",), ("needle",), (64,))
    several = kvbench.RunConfig(("knorm",), ("needle",), (64,), seeds=(0, 1, 2))
    other = kvbench.RunConfig(("knorm",), ("needle",), (64,), seed=1)
    assert _default_folder(one) == _default_folder(several) != _default_folder(other)


def test_one_way_to_name_seeds() -> None:
    with pytest.raises(BadInput, match=r"--seed 3 and --seeds"):
        kvbench.RunConfig(("knorm",), ("needle",), (64,), seed=3, seeds=(0, 1))
    assert kvbench.RunConfig(("knorm",), ("needle",), (64,), seeds=(1, 1, 0)).seeds == (1, 0)
