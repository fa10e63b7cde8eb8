"""Law 10: a row is written once, and a run that was killed goes on where it stopped."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
from pandas.testing import assert_frame_equal

import kvbench
from kvbench.errors import StoreError
from kvbench.model.open import OpenModel
from kvbench.store.results import read_rows
from tests.laws.runs import by_key, config, lines, python, recorded
from tests.laws.toy import KILL

RUN = """
import kvbench
from tests.laws import toy
toy.add()
kvbench.run({config!r}, progress=False)
"""
CELLS = 7  # three policies at two budgets, and full


@pytest.fixture(scope="module")
def whole(folder: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, kvbench.RunResult]:
    """An uninterrupted run: two tasks of four samples."""
    from tests.laws import toy

    out = tmp_path_factory.mktemp("whole")
    with toy.added():
        return out, recorded(config(folder, out))[0]


Whole = tuple[Path, kvbench.RunResult]


def assert_same_table(one: kvbench.RunResult, other: kvbench.RunResult) -> None:
    """All aggregates but those of times, whatever the folder is called."""
    tables = [
        found.table[~found.table["metric"].str.endswith("_s")].drop(columns="run", errors="ignore")
        for found in (one, other)
    ]
    assert (tables[0]["n"].dropna() > 0).all()
    assert_frame_equal(*tables)


def prefills(forwards: list) -> int:
    """Contexts that were read in full: forwards of many tokens that begin at position 0."""
    return sum(int(seen.positions[0, 0]) == 0 and seen.ids.shape[1] > 1 for seen in forwards)


@pytest.mark.usefixtures("toys")
def test_kill(folder: str, tmp_path: Path, whole: Whole) -> None:
    """B53, B54, B55: kill -9 in the second task, while its second sample is scored."""
    settings = config(folder, tmp_path)
    killed = python("from kvbench import RunConfig\n" + RUN.format(config=settings), **{KILL: "generate/1"})
    assert killed.returncode == -9, killed.stderr[-2000:]
    before = lines(tmp_path)
    assert [row["task_spec"] for row in before] == ["laws_toy"] * 4 * CELLS + [
        "laws_toy:kind=generate"
    ] * CELLS
    assert len(read_rows(tmp_path)) == len(before)  # whatever reads results can read these
    result, forwards = recorded(settings)
    assert prefills(forwards) == 3
    assert lines(tmp_path)[: len(before)] == before
    path, uninterrupted = whole
    assert by_key(lines(tmp_path)) == by_key(lines(path))  # in two processes: bit for bit
    assert_same_table(result, uninterrupted)


@pytest.mark.usefixtures("toys")
@pytest.mark.parametrize("share", [0.0, 0.31, 0.5, 0.77, 0.999])
def test_torn_anywhere(folder: str, tmp_path: Path, whole: Whole, share: float) -> None:
    """A file cut at any byte, as by a full disk or a lost machine."""
    path, uninterrupted = whole
    settings = config(folder, tmp_path)
    (tmp_path / "manifest.json").write_bytes((path / "manifest.json").read_bytes())
    data = (path / "rows.jsonl").read_bytes()
    (tmp_path / "rows.jsonl").write_bytes(data[: int(share * len(data))])
    result, forwards = recorded(settings)
    complete = data[: int(share * len(data))].count(b"\n") // CELLS
    assert prefills(forwards) == 8 - complete
    assert by_key(lines(tmp_path)) == by_key(lines(path))
    assert_same_table(result, uninterrupted)


@pytest.mark.usefixtures("toys")
def test_a_finished_run_loads_nothing(folder: str, whole: Whole) -> None:
    """B56: same numbers, and the weights are not even read."""
    path, before = whole
    rows = (path / "rows.jsonl").read_bytes()
    with patch.object(OpenModel, "load", side_effect=AssertionError("weights were read")):
        again = kvbench.run(config(folder, path), progress=False)
    assert_frame_equal(again.table, before.table)
    assert_frame_equal(again.rows, before.rows)
    assert (path / "rows.jsonl").read_bytes() == rows


@pytest.mark.usefixtures("toys")
@pytest.mark.parametrize(
    ("change", "more"),
    [
        ({"policies": ("knorm", "random", "snapkv", "tova")}, 2 * 8),
        ({"budgets": (8, 20, 33)}, 3 * 8),
        ({"pins": "4,4"}, 6 * 8),
        ({"schedule": "chunked", "chunk": 16}, 7 * 8),
        ({"seed": 1}, 7 * 8),
        ({"question": "seen"}, 7 * 8),
        ({"tasks": ("laws_toy", "laws_toy:kind=generate", "laws_toy:ids=21")}, 7 * 2),
        ({"limit": 2}, 0),
    ],
)
def test_only_what_is_new(folder: str, tmp_path: Path, whole: Whole, change: dict, more: int) -> None:
    """B52: a changed setting is another configuration with rows of its own; the old rows stay."""
    path, _ = whole
    for name in ("manifest.json", "rows.jsonl"):
        (tmp_path / name).write_bytes((path / name).read_bytes())
    settings = config(folder, tmp_path, **change)
    result, _ = recorded(settings)
    after = lines(tmp_path)
    assert after[: len(lines(path))] == lines(path)
    assert len(after) - len(lines(path)) == more
    assert len(by_key(after)) == len(after)
    limit = settings.limit or 4
    samples = 2 * limit + (2 if len(settings.tasks) == 3 else 0)
    assert len(result.rows) == samples * (1 + len(settings.policies) * len(settings.budgets))


@pytest.mark.usefixtures("toys")
def test_other_weights_are_refused(folder: str, tmp_path: Path, whole: Whole) -> None:
    """B52: a folder holds the results of one model."""
    from tests.tiny import tiny_model, tiny_tokenizer

    path, _ = whole
    other = tmp_path / "model"
    tiny_model("llama", "sdpa", seed=1).save_pretrained(other)
    tiny_tokenizer().save_pretrained(other)
    with pytest.raises(StoreError, match="another configuration"):
        kvbench.run(config(str(other), path), progress=False)


@pytest.mark.usefixtures("toys")
def test_failed_samples_are_tried_again(folder: str, tmp_path: Path) -> None:
    """A failed row is not a result: a rerun computes it, and nothing else."""
    settings = config(folder, tmp_path, policies=("laws_faulty", "knorm"))
    first, _ = recorded(settings)
    second, forwards = recorded(settings)
    assert first.failed == second.failed == 16
    assert prefills(forwards) >= 8
    assert len(second.rows) == len(first.rows)


def test_agreement_is_with_the_full_cache_of_the_same_sample(whole: Whole) -> None:
    rows = whole[1].rows
    keys = ["task_spec", "sample"]
    full = rows[rows["spec"] == "full"].set_index(keys)
    rest = rows[rows["spec"] != "full"].set_index(keys)
    theirs = full.loc[rest.index]
    choices = rest["label"].notna().to_numpy()
    same = (rest["label"].to_numpy() == theirs["label"].to_numpy()) & choices
    same |= (rest["text"].str.strip().to_numpy() == theirs["text"].str.strip().to_numpy()) & ~choices
    assert rest["metric:agreement"].tolist() == same.astype(float).tolist()
    assert 0 < same.mean() < 1
    assert full["metric:agreement"].isna().all()
